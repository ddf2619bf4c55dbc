// SpareHeap: gives memory that malloc keeps for nobody back to the operating system when it has
// become much. One thread.
#pragma once

#include <cstdint>
#include <optional>

namespace tenure::train {

// Note [Holes in the heap]
// What a step frees, glibc's malloc keeps. Small blocks that stay lie between large ones that go,
// so many a hole is a little too small for what the next step asks for, and new memory is taken:
// a rank whose tensors took 14 MiB at most grew by 60 in 300 steps. To give all holes back costs a
// few milliseconds, and page faults for those that the next step fills again. So it is done when
// the process has grown by a part since the step after the last time. Growth that is not malloc's
// is part of what that is measured against from then on, and does not cause it again and again.
class SpareHeap {
 public:
  // At the end of a step, when least is in use. `resident`: what the process has in memory and is
  // no file's, in bytes. Returns whether spare memory was given back.
  bool step_ended(int64_t resident);

 private:
  bool begun_ = false;
  std::optional<int64_t> base_;  // one step after memory was given back
};

}  // namespace tenure::train
