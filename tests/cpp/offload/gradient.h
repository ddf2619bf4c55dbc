// The gradient of a loss, which the tests of sessions compare.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd.h>

namespace tenure::offload {

inline at::Tensor gradient(const at::Tensor& weight, const at::Tensor& loss) {
  return torch::autograd::grad({loss}, {weight})[0];
}

}  // namespace tenure::offload
