// Trace: a step's forward as the fit planner sees it: which calls made which storages of which.
// Plain data, beside the Timeline of the same step, whose ticks it counts by.
#pragma once

#include <tenure/core/names.h>
#include <tenure/offload/timeline.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace tenure::offload {

inline constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// A storage, from the call that made it on.
struct ValueTrace {
  uint64_t bytes = 0;
  uint32_t call = kNone;   // that made it; none: it was there before, or nobody saw
  uint32_t saved = kNone;  // its place in Timeline::saved; none: autograd did not save it
  size_t born = 0;         // the interval in which it was first seen
  size_t gone = kNever;    // as in SavedTrace
  bool steady = true;      // nobody wrote to it after that call
};

// A call of an operator.
struct CallTrace {
  NameId op = NameId::none;
  NameId module = NameId::none;
  std::vector<uint32_t> inputs;   // values, each once
  std::vector<uint32_t> outputs;  // values that it made
  double seconds = 0;
  uint64_t scratch = 0;     // bytes that it takes beyond its outputs, and gives back
  bool repeatable = false;  // calling it again gives the same bits, and does nothing else
};

struct Trace {
  std::vector<ValueTrace> values;
  std::vector<CallTrace> calls;  // in order
};

}  // namespace tenure::offload
