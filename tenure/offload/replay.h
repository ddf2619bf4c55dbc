// What making values again does to a step: Note [Peak in backward] in fit_planner.h. Pure functions
// of plain data.
//
// Note [Order of making]
// Backward asks for what it saved. A value that is made again and is not there asks for the inputs
// of its call, one after the other, each in the same way; then the call runs, once a step, and
// makes all its outputs. One that is asked for again stays until that; the others are let go at
// once, and so are inputs that were asked for the last time. What backward took is its own.
// The first use of a storage comes at the tick that it makes; when in the interval of the last one
// the others come is not known, so until then it counts.
#pragma once

#include <tenure/offload/timeline.h>
#include <tenure/offload/trace.h>

#include <cstdint>
#include <vector>

namespace tenure::offload {

struct Replay {
  // As in FitPlan.
  Timeline timeline;
  std::vector<uint32_t> roots;
  std::vector<uint32_t> asks;
  std::vector<bool> recorded;
  std::vector<double> seconds;  // by tick: what is made again then
  // By value: when one that is made again is made, and when it was last asked for.
  struct Life {
    size_t made = kNever;
    size_t last = 0;
  };
  std::vector<Life> lives;
};

// `remade` by value. REQUIRES: what they are made of is steady, and their calls can be repeated.
Replay replay(const Timeline& timeline, const Trace& trace, const std::vector<bool>& remade);

}  // namespace tenure::offload
