// Modules of torch::nn in a pipeline, on several ranks.
#include "pipelined_model.h"

#include <tenure/pipeline/module_stage.h>
#include <tenure/pipeline/pipeline.h>
#include <tenure/pipeline/schedule.h>

#include <ATen/ops/equal.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

namespace {

using torch::nn::Sequential;
using namespace tenure::pipeline;

constexpr uint32_t kParts = 8;

std::vector<Sequential> blocks(uint32_t count) {
  at::manual_seed(7);
  std::vector<Sequential> out;
  for (uint32_t i = 0; i < count; ++i) {
    out.emplace_back(torch::nn::Linear(6, 12), torch::nn::GELU(), torch::nn::Linear(12, 6));
  }
  return out;
}

struct Batch {
  std::vector<at::Tensor> x = at::randn({2 * kParts, 6}).chunk(kParts);
  std::vector<at::Tensor> y = at::randn({2 * kParts, 6}).chunk(kParts);
};

}  // namespace

void train_pipelined(const Group& group, const std::string& schedule) {
  const auto plan = make_schedule(schedule, static_cast<uint32_t>(group->getSize()), kParts);
  const auto own = plan.stages_of(static_cast<uint32_t>(group->getRank()));
  auto split = blocks(plan.stages());
  auto whole = blocks(plan.stages());
  const Batch batch;

  std::vector<std::unique_ptr<Stage>> stages;
  for (const auto number : own) {
    stages.push_back(std::make_unique<ModuleStage<Sequential>>(
        split[number], [&](uint32_t microbatch) { return batch.x[microbatch]; }));
  }
  Pipeline pipeline(plan, std::move(stages), {.up = group, .down = group, .side = group},
                    {.timeout = std::chrono::seconds(30), .strict = Strict::on});
  const auto loss = [&](uint32_t microbatch, const std::vector<at::Tensor>& outputs) {
    return at::mse_loss(outputs[0], batch.y[microbatch]);
  };
  constexpr int steps = 3;  // the first shows what a microbatch takes, others are held against it
  for (int step = 0; step < steps; ++step) {
    for (auto& block : split) {
      block->zero_grad();
    }
    const auto result = pipeline.step(Pass::train, loss);
    const auto is_last = std::ranges::find(own, plan.stages() - 1) != own.end();
    TORCH_CHECK(result.loss.defined() == is_last, "a loss on another rank than the last stage's");
  }

  for (uint32_t i = 0; i < kParts; ++i) {
    auto h = batch.x[i];
    for (auto& block : whole) {
      h = block->forward(h);
    }
    at::mse_loss(h, batch.y[i]).backward(at::tensor(1.0F / kParts));
  }
  for (const auto number : own) {
    const auto ours = split[number]->parameters();
    const auto theirs = whole[number]->parameters();
    for (size_t i = 0; i < ours.size(); ++i) {
      TORCH_CHECK(at::equal(ours[i].grad(), theirs[i].grad()), schedule, ": parameter ", i,
                  " of stage ", number, " has another gradient");
    }
  }
}
