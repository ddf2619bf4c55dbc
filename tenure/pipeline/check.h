// Check: whether a schedule can run and does each thing once. Pure; any thread.
#pragma once

#include <tenure/pipeline/schedule.h>

#include <cstdint>
#include <functional>

namespace tenure::pipeline {

// Throws InputError that names the first cell which is wrong, as rank and position, and why: an
// action of a stage that is not the rank's, one that is there twice, missing, before what it needs,
// or one that never runs because ranks wait for each other. A schedule without any backward passes.
void check(const Schedule& schedule);
// `cell` gives the number under which the user knows an action, of its rank and position.
void check(const Schedule& schedule,
           const std::function<uint32_t(uint32_t rank, uint32_t position)>& cell);

}  // namespace tenure::pipeline
