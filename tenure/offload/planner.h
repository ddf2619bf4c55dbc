// The planner: from a measured step and a cap on the device's memory, what to do with each saved
// storage, how far copies may lag behind, and when to fetch what. Pure functions of plain data.
//
// Note [Earliest saved goes first]
// What is saved first is needed last, so it has the longest time to go and to come back, and its
// copy can start when the step does. What is saved last is needed at once. So storages are kept
// from the last one backwards for as long as the peak stays under the cap, and the copies of the
// others run from the first moment on without a gap: no other choice of the same bytes moves them
// sooner.
//
// Note [Host order]
// An allocator counts bytes in the order in which the host asks, not in which the device works. So
// whether a peak holds can be computed from the timeline exactly, whatever the device's speed:
// speed decides only how long the device waits.
#pragma once

#include <tenure/offload/action.h>
#include <tenure/offload/timeline.h>

#include <cstdint>
#include <vector>

namespace tenure::offload {

struct Plan {
  std::vector<Action> actions;  // by storage, in the order of saving
  std::vector<Kept> why;        // of those that are kept
  // For each interval: bytes that copies under way may still hold on the device beyond the plan.
  std::vector<int64_t> room;
  // For each tick: the storages to fetch then, in the order in which they are needed.
  std::vector<std::vector<uint32_t>> fetch;
  // Whether it stays on the device from its first use to its last; else each use fetches it.
  std::vector<bool> stays;
  int64_t peak = 0;  // promised
};

// The interval from which on it would be on the device for our sake alone.
size_t gone_from(const SavedTrace& saved);
// The one from which on it would be so again, after its first use and until its last.
size_t between_uses(const SavedTrace& saved);

// The least peak that any plan can promise.
int64_t least_peak(const Timeline& timeline);

// Below which size storages are kept in any case. A copy that moves less than `overhead` seconds of
// bytes does not pay, but where there are few of those next to all that is moved nobody notices,
// and nothing is kept.
uint64_t small_size(const Timeline& timeline, double bandwidth, double overhead);

// All that can go goes.
Plan plan_all(const Timeline& timeline, int64_t cap, uint64_t small);
// Only what must. REQUIRES least_peak(timeline) <= cap.
Plan plan_within(const Timeline& timeline, int64_t cap, uint64_t small);

}  // namespace tenure::offload
