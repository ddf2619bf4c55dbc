// The fit planner: from a measured step, its trace and a cap on the device's memory, which saved
// storages are kept, moved to the host or made again, and what must be held to make them. Pure
// functions of plain data.
//
// Note [The frontier]
// Sweeping the price of a byte, Note [The cut] gives ways from keeping everything to making again
// whatever can be. Layers are alike, so all of them turn at one price; between two ways the values
// born before some tick have the higher price, those after it the lower: what is saved first is
// held longest, and what is made again while most is held is what was saved last.
//
// Note [Peak in backward]
// What is made again lives from the first time it is asked for to the last, and a call that makes
// it needs its inputs, its outputs and its scratch at once. fit() replays backward tick by tick in
// the order in which the session will do it and adds those bytes to the measured levels, so the
// peak it promises is that of the whole step, and the choice what to keep and what to move is
// plan_within()'s on top of that.
#pragma once

#include <tenure/offload/bus.h>
#include <tenure/offload/planner.h>
#include <tenure/offload/trace.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tenure::offload {

struct FitPlan {
  // The step's timeline with what is made again in its levels. Behind the storages that autograd
  // saves come the other values that must be held to make others: `roots`, by value. What is held
  // has `needed`, `last` and `uses` with the asks of those that are made of it, and is on the
  // device from the first to the last.
  Timeline timeline;
  std::vector<uint32_t> roots;
  Plan plan;  // of that timeline; Action::recompute for what is dropped
  // By value: how often one that is made again is asked for, by backward or to make another, see
  // Note [Order of making]; it is let go after the last time. 0: it is not made again.
  std::vector<uint32_t> asks;
  std::vector<bool> recorded;    // by call: it is repeated, once a step
  int64_t least = 0;             // peak that any plan of this step can promise
  double recompute_seconds = 0;  // a step
  double exposed_seconds = 0;    // waiting for copies
  double seconds() const { return recompute_seconds + exposed_seconds; }
};

// The quickest plan whose peak is at most `cap`; none: there is no such plan.
std::optional<FitPlan> fit(const Timeline& timeline, const Trace& trace, const Bus& bus,
                           int64_t cap);

// The least peak that any plan can promise.
int64_t least_fit_peak(const Timeline& timeline, const Trace& trace, const Bus& bus);

// A point of the frontier: no other is both lower and quicker.
struct Point {
  int64_t peak = 0;
  double seconds = 0;  // beyond a step that keeps everything
  uint64_t kept = 0;   // bytes
  uint64_t moved = 0;
  uint64_t recomputed = 0;
};
// From the highest peak down to the least, about `points` of them.
std::vector<Point> frontier(const Timeline& timeline, const Trace& trace, const Bus& bus,
                            size_t points);

}  // namespace tenure::offload
