// Check: whether a schedule can run and does each thing once. Pure; any thread.
#pragma once

#include <tenure/pipeline/schedule.h>

namespace tenure::pipeline {

// Throws InputError that names the first cell which is wrong, as rank and position, and why: an
// action of a stage that is not the rank's, one that is there twice, missing, before what it needs,
// or one that never runs because ranks wait for each other. A schedule without any backward passes.
void check(const Schedule& schedule);

}  // namespace tenure::pipeline
