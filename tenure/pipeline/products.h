// Products: autograd's nodes whose weights' gradients are a matrix product or a convolution of
// their own, so that it pays to find them apart from the inputs'. Pure; any thread.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace tenure::pipeline {

bool is_product(const torch::autograd::Node& node);

// Whether reading what a product has saved runs hooks (of a checkpoint, of an Offload), which would
// make or fetch it anew each time. REQUIRES: is_product(node).
bool reads_through_hooks(const torch::autograd::Node& node);

}  // namespace tenure::pipeline
