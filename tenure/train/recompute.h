// Recompute: a part of a forward that keeps its input alone, and is run again when its backward
// comes. It must give the same twice.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tenure::train {

using Run = std::function<at::Tensor(const at::Tensor&)>;

// run(x), with gradients for x and the weights that `run` uses: all of them must be named.
at::Tensor recomputed(const Run& run, const at::Tensor& x, const std::vector<at::Tensor>& weights);

}  // namespace tenure::train
