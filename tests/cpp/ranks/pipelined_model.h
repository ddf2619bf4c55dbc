// Modules of torch::nn in a pipeline, on several ranks. Throws if what it checks does not hold.
#pragma once

#include "sharded_model.h"

#include <string>

// Gradients of a step are those of the unsplit model, within the bound.
void train_pipelined(const Group& group, const std::string& schedule);
