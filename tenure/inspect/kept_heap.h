// KeptHeap: how much of what malloc keeps for later is memory. No thread of its own; one at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace tenure::inspect {

// Note [Kept on paper]
// malloc counts what it keeps in addresses. Pages that malloc_trim() gave back are still among
// them, and so are holes that nobody ever wrote to: a heap may fall to pieces on paper while the
// process does not grow by a byte. Nobody can be asked which pages of the heap are there, short of
// a walk over them. But what the process has besides malloc's memory is known at each moment, less
// what is on paper alone, so where that seems to be less than it once was, the difference is on
// paper. A program that gives other memory back, or takes blocks that it does not write to, is told
// of too little here; what the whole process grows by shows it all the same.
class KeptHeap {
 public:
  // All of one moment: bytes that malloc gave out, those that it keeps, and the process's own
  // memory, in RAM or swapped out, that is no file and not shared. Returns the part of `kept` that
  // is memory.
  int64_t resident(int64_t given, int64_t kept, int64_t own) {
    const auto besides = own - given - kept;
    most_besides_ = std::max(besides, most_besides_.value_or(besides));
    return std::clamp<int64_t>(kept - (*most_besides_ - besides), 0, kept);
  }

 private:
  std::optional<int64_t> most_besides_;
};

}  // namespace tenure::inspect
