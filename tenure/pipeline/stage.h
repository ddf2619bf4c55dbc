// Stage: a part of a model that a pipeline runs: a module of Python, or of torch::nn.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tenure::pipeline {

class Stage {
 public:
  Stage() = default;
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;
  virtual ~Stage() = default;

  // On the first stage `inputs` is empty: it knows its microbatches itself. Called on the thread
  // that steps, without the GIL. Whatever it throws ends the step on every rank.
  virtual std::vector<at::Tensor> forward(uint32_t microbatch, std::vector<at::Tensor> inputs) = 0;
  // Leaves whose gradients a step adds to.
  virtual std::vector<at::Tensor> parameters() const = 0;
};

// The loss of a microbatch from what the last stage made: one element.
using Loss = std::function<at::Tensor(uint32_t microbatch, const std::vector<at::Tensor>& outputs)>;

}  // namespace tenure::pipeline
