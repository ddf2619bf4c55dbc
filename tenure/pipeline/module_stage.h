// ModuleStage: a module of torch::nn as a stage: one tensor in, one out. Includes nothing of
// torch::nn: whoever has a module has its headers. The thread that steps.
//
//   stages.push_back(std::make_unique<ModuleStage<torch::nn::Sequential>>(blocks, input));
#pragma once

#include <tenure/pipeline/stage.h>

#include <functional>
#include <utility>
#include <vector>

namespace tenure::pipeline {

// `Module` is what torch::nn calls a module holder, or a pointer to a module.
template <class Module>
class ModuleStage final : public Stage {
 public:
  // On the first stage: a microbatch of the batch.
  using Input = std::function<at::Tensor(uint32_t microbatch)>;

  explicit ModuleStage(Module module, Input input = {})
      : module_(std::move(module)), input_(std::move(input)) {}

  std::vector<at::Tensor> forward(uint32_t microbatch, std::vector<at::Tensor> inputs) override {
    return {module_->forward(inputs.empty() ? input_(microbatch) : std::move(inputs.front()))};
  }
  std::vector<at::Tensor> parameters() const override { return module_->parameters(); }

 private:
  Module module_;
  Input input_;
};

}  // namespace tenure::pipeline
