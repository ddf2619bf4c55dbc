// Timeline: one step as the planner sees it. A tick is the moment at which a storage is saved or
// first needed back; interval t lies between tick t and the next. Host order throughout: that is
// the order in which allocators count. Plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace tenure::offload {

inline constexpr size_t kNever = std::numeric_limits<size_t>::max();

struct SavedTrace {
  uint64_t bytes = 0;
  size_t saved = 0;        // the tick at which it was saved
  size_t gone = kNever;    // at which nobody but us held it any more; never: until it was needed
  size_t needed = kNever;  // at which backward first asked for it
  size_t last = 0;         // the interval in which it last did
  uint32_t uses = 0;       // how often
  // What a fit plan has decided.
  bool remade = false;  // dropped and made again: it is neither kept nor moved
  bool stays = false;   // from its first use to its last, which the levels contain
  bool lasts = false;   // if it is kept, it is there until its last use, not its first
};

struct Timeline {
  int64_t at_begin = 0;           // allocated before the first tick
  std::vector<int64_t> peak;      // of each interval, with every saved storage away unless in use
  std::vector<int64_t> level;     // at each tick, the same; empty: not known
  std::vector<SavedTrace> saved;  // in the order of saving

  size_t ticks() const { return peak.size(); }
};

}  // namespace tenure::offload
