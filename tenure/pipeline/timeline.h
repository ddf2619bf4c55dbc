// Timeline: when each action of a schedule runs if every rank does its actions in order, each as
// soon as what it needs is there. Pure; any thread.
#pragma once

#include <tenure/pipeline/schedule.h>

#include <cstdint>
#include <vector>

namespace tenure::pipeline {

// In any unit. A whole backward takes as long as its halves.
struct Costs {
  double forward = 1;
  double input_backward = 1;
  double weight_backward = 1;
  double message = 0;

  double of(Kind kind) const;
};

struct Span {
  double begin = 0;
  double end = 0;
};

struct Timeline {
  std::vector<std::vector<Span>> spans;  // by rank and position
  double length = 0;

  // The part of the time in which a rank has nothing to do.
  double bubble(uint32_t rank) const;
};

// A cell of a schedule whose action never runs, and what it waits for.
struct Stuck {
  uint32_t rank = 0;
  uint32_t position = 0;
  Action waits_for;
};

// What an action needs of another stage; nothing for the first forward, the last backward and
// weight backwards.
bool needs_another(const Schedule& schedule, const Action& action, Action& needed);

// Both at once, as they are found in the same way. `stuck` is one cell for each rank that does not
// come to its end.
Timeline run_on_paper(const Schedule& schedule, const Costs& costs, std::vector<Stuck>* stuck);

// REQUIRES: check(schedule) passes.
Timeline timeline(const Schedule& schedule, const Costs& costs = {});

}  // namespace tenure::pipeline
