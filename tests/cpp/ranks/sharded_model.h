// A sharded model of C++ on several ranks. Each throws if what it checks does not hold.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <vector>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Store = c10::intrusive_ptr<c10d::Store>;

struct Losses {
  std::vector<double> plain, sharded;  // by step
};

Losses train_sharded(const Group& group, const Group& side, const Store& store);
// Nothing is readable outside a use.
void release_sharded(const Group& group, const Group& side, const Store& store);
// Exceptions, forwards without backward, retained graphs.
void misuse_sharded(const Group& group, const Group& side, const Store& store);
// A backward after one that has failed starts clean.
void failing_sharded(const Group& group, const Group& side, const Store& store);
// A unit goes, and its sum begins, after the last of its nodes that a backward runs, not the last
// one.
void partly_sharded(const Group& group, const Group& side, const Store& store);
// What autograd tells of a write the next pass does not tell of again.
void written_in_backward(const Group& group, const Group& side, const Store& store);
