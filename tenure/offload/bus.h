// When things happen in a step, and how long it waits for copies. Pure functions of plain data.
//
// Note [Mirrored time]
// Only forward's calls are timed. Backward takes twice as long and mirrors it: what was saved a
// second before forward's end is needed two seconds after it. A step may go forward and back
// several times; each turn is seen on its own.
#pragma once

#include <tenure/offload/planner.h>
#include <tenure/offload/trace.h>

#include <cstdint>
#include <vector>

namespace tenure::offload {

// What moving costs. Without bandwidth nothing can be moved.
struct Bus {
  double out = 0;  // bytes a second
  double back = 0;
  uint64_t small = 0;  // smaller storages are not moved
  bool moves() const { return out > 0 && back > 0; }
};

// How long each interval takes.
std::vector<double> interval_seconds(const Timeline& timeline, const Trace& trace);

// Note [Bus time]
// Copies to the host run beside forward, and back beside backward. A copy is free while the bus is;
// what does not fit in between is waited for. This plays that through: copies out one after the
// other in the order of saving, copies back in the order of fetching; compute waits where copies
// out would hold more than there is room, and where what it needs is not there.
double bus_seconds(const Timeline& timeline, const Plan& plan, const Bus& bus,
                   const std::vector<double>& seconds);

}  // namespace tenure::offload
