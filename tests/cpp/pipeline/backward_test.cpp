#include <tenure/pipeline/backward.h>

#include <tenure/core/names.h>
#include <tenure/core/owner.h>
#include <tenure/core/scope.h>
#include <tenure/core/storage_ref.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sigmoid.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>
#include <vector>

namespace tenure::pipeline {
namespace {

// A stage of one layer, with its forward done.
struct Layer {
  at::Tensor input = at::randn({4, 8}).requires_grad_();
  at::Tensor weight = at::randn({8, 8}).requires_grad_();
  at::Tensor output = at::gelu(at::linear(input, weight));
  Backward backward{{input}, {output}};
  std::vector<at::Tensor> gradients{at::ones_like(output)};

  std::vector<at::Tensor> first_half() { return first_half_of(backward, Halves::if_plain); }
  std::vector<at::Tensor> first_half_of(Backward& of, Halves halves) const {
    return of.run_inputs(gradients, intern_owner(OwnerKind::gradient, "test"), ScopeId::process,
                         halves);
  }
};

// Six of them, with biases.
struct Layers : Layer {
  std::vector<at::Tensor> weights;
  at::Tensor top;

  Layers() {
    for (int i = 0; i < 6; ++i) {
      weights.push_back(at::randn({8, 8}).requires_grad_());
      weights.push_back(at::randn({8}).requires_grad_());
    }
    top = run();
  }
  at::Tensor run() const {
    auto x = input;
    for (size_t i = 0; i < weights.size(); i += 2) {
      x = at::gelu(at::linear(x, weights[i], weights[i + 1]));
    }
    return x;
  }
  std::vector<bool> found() const {
    std::vector<bool> out;
    for (size_t i = 0; i < weights.size(); i += 2) {
      out.push_back(weights[i].grad().defined() && weights[i + 1].grad().defined());
    }
    return out;
  }
};

TEST(Backward, TheInputsGradientIsThereBeforeTheWeights) {
  Layer layer;
  const auto found = layer.first_half();
  EXPECT_TRUE(found[0].defined());
  EXPECT_FALSE(layer.weight.grad().defined());
  layer.backward.run_weights();
  EXPECT_TRUE(layer.weight.grad().defined());
}

TEST(Backward, TwoHalvesFindWhatTheWholeFinds) {
  Layer layer;
  const auto output = at::gelu(at::linear(layer.input, layer.weight));
  const auto found = layer.first_half();
  layer.backward.run_weights();
  const auto of_weight = std::exchange(layer.weight.mutable_grad(), {});
  Backward whole({layer.input}, {output});
  EXPECT_TRUE(at::equal(found[0], whole.run(layer.gradients)[0]));
  EXPECT_TRUE(at::equal(of_weight, layer.weight.grad()));
}

TEST(Backward, OnlyTheWeightsWaitWhoseProductsRunLast) {
  Layers layers;
  Backward backward({layers.input}, {layers.top});
  const auto found = layers.first_half_of(backward, Halves::last_if_plain);
  EXPECT_TRUE(found[0].defined());
  EXPECT_FALSE(layers.input.grad().defined());
  EXPECT_EQ(layers.found(), std::vector<bool>({false, false, true, true, true, true}));
  backward.run_weights();
  EXPECT_EQ(layers.found(), std::vector<bool>(6, true));
}

TEST(Backward, WithOnlyTheLastWaitingAllIsAsOfTheWhole) {
  Layers layers;
  Backward halves({layers.input}, {layers.top});
  Backward whole({layers.input}, {layers.run()});
  const auto found = layers.first_half_of(halves, Halves::last_if_plain);
  halves.run_weights();
  std::vector<at::Tensor> gradients;
  for (auto& weight : layers.weights) {
    gradients.push_back(std::exchange(weight.mutable_grad(), {}));
  }
  EXPECT_TRUE(at::equal(found[0], whole.run(layers.gradients)[0]));
  for (size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(gradients[i], layers.weights[i].grad()));
  }
}

// Of layers whose weights are made of others, so that nodes which lead to these alone save
// something, with the graph kept by whoever holds the result.
std::vector<bool> still_saved(Halves halves) {
  Layer layer;
  std::vector<StorageRef> saved;
  auto top = layer.input;
  for (int i = 0; i < 6; ++i) {
    const auto weight = at::sigmoid(at::randn({8, 8}).requires_grad_());
    saved.emplace_back(weight);
    top = at::gelu(at::linear(top, weight));
  }
  Backward backward({layer.input}, {top});
  const auto found = layer.first_half_of(backward, halves);
  backward.run_weights();
  std::vector<bool> out;
  for (const auto& one : saved) {
    out.push_back(one.alive());
  }
  return out;
}

TEST(Backward, WhoKeepsTheGraphKeepsNothingThatItSaved) {
  EXPECT_EQ(still_saved(Halves::always), std::vector<bool>(6, false));
  EXPECT_EQ(still_saved(Halves::if_plain), std::vector<bool>(6, false));
  EXPECT_EQ(still_saved(Halves::last_if_plain), std::vector<bool>(6, false));
}

// Of a weight that two products read, one of which waits for the other half.
TEST(Backward, WhatBothHalvesReadIsReadByBoth) {
  Layer layer;
  const auto base = at::randn({8, 8}).requires_grad_();
  const auto run = [&] {
    const auto weight = at::sigmoid(base);
    return at::mm(at::gelu(at::mm(layer.input, weight.t())), weight.t());
  };
  Backward halves({layer.input}, {run()});
  Backward whole({layer.input}, {run()});
  const auto found = layer.first_half_of(halves, Halves::last_if_plain);
  halves.run_weights();
  const auto of_base = std::exchange(base.mutable_grad(), {});
  EXPECT_TRUE(at::equal(found[0], whole.run(layer.gradients)[0]));
  EXPECT_TRUE(at::allclose(of_base, base.grad()));
}

TEST(Backward, WhoeverHasHookedANodeSeesOneBackward) {
  Layer layer;
  int calls = 0;
  layer.weight.register_hook([&](const at::Tensor& /*gradient*/) { ++calls; });
  const auto found = layer.first_half();
  EXPECT_TRUE(found[0].defined());
  EXPECT_TRUE(layer.weight.grad().defined());
  EXPECT_EQ(calls, 1);
  layer.backward.run_weights();
  EXPECT_EQ(calls, 1);
}

struct CountRuns : torch::autograd::FunctionPostHook {
  explicit CountRuns(int& runs) : runs_(runs) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*inputs*/) override {
    ++runs_;
    return outputs;
  }
  int& runs_;
};

TEST(Backward, HooksOnTheWayIntoAnInputsGradientRun) {
  for (const auto halves : {Halves::always, Halves::if_plain, Halves::last_if_plain}) {
    Layer layer;
    int runs = 0;
    const auto leaf = torch::autograd::impl::grad_accumulator(layer.input);
    leaf->add_post_hook(std::make_unique<CountRuns>(runs));
    int tensor_hook = 0;
    layer.input.register_hook([&](const at::Tensor& /*gradient*/) { ++tensor_hook; });
    EXPECT_TRUE(layer.first_half_of(layer.backward, halves)[0].defined());
    layer.backward.run_weights();
    EXPECT_EQ(runs, 1);
    EXPECT_EQ(tensor_hook, 1);
    EXPECT_TRUE(layer.weight.grad().defined());
  }
}

// Of a stage with a weight that does not wait, and of one that no input leads to.
struct Mixed : Layer {
  at::Tensor scale = at::randn({8}).requires_grad_();
  at::Tensor lone = at::randn({4, 8}).requires_grad_();

  std::vector<at::Tensor> run() const {
    return {at::mul(at::gelu(at::linear(input, weight)), scale), at::sigmoid(lone)};
  }
  std::vector<at::Tensor> weights() const { return {weight, scale, lone}; }
  static std::vector<at::Tensor> ones(const std::vector<at::Tensor>& outputs) {
    return {at::ones_like(outputs[0]), at::ones_like(outputs[1])};
  }
};

TEST(Backward, HooksOnWeightsRunOnceWhicheverHalfFindsThem) {
  Mixed stage;
  std::vector<int> runs(3);
  for (size_t i = 0; i < runs.size(); ++i) {
    stage.weights()[i].register_hook([&runs, i](const at::Tensor& gradient) {
      ++runs[i];
      return at::mul(gradient, 2);
    });
  }
  const auto outputs = stage.run();
  Backward halves({stage.input}, outputs);
  stage.gradients = Mixed::ones(outputs);
  const auto found = stage.first_half_of(halves, Halves::always);
  EXPECT_FALSE(stage.weight.grad().defined());
  halves.run_weights();
  EXPECT_EQ(runs, std::vector<int>(3, 1));

  std::vector<at::Tensor> in_halves;
  for (const auto& weight : stage.weights()) {
    in_halves.push_back(std::exchange(weight.mutable_grad(), {}));
  }
  Backward whole({stage.input}, stage.run());
  EXPECT_TRUE(at::equal(found[0], whole.run(stage.gradients)[0]));
  EXPECT_EQ(runs, std::vector<int>(3, 2));
  for (size_t i = 0; i < in_halves.size(); ++i) {
    EXPECT_TRUE(at::equal(in_halves[i], stage.weights()[i].grad()));
  }
}

// Of a weight that both outputs lead to, only one of them by way of the input.
TEST(Backward, AHookSeesTheWholeGradient) {
  Layer layer;
  const auto scale = at::randn({8}).requires_grad_();
  std::vector<at::Tensor> seen;
  scale.register_hook([&](const at::Tensor& gradient) { seen.push_back(gradient.clone()); });
  const std::vector<at::Tensor> outputs{
      at::mul(at::gelu(at::linear(layer.input, layer.weight)), scale), at::sigmoid(scale)};
  Backward backward({layer.input}, outputs);
  layer.gradients = Mixed::ones(outputs);
  const auto found = layer.first_half_of(backward, Halves::always);
  backward.run_weights();
  ASSERT_EQ(seen.size(), 1U);
  EXPECT_TRUE(at::equal(seen[0], scale.grad()));
}

}  // namespace
}  // namespace tenure::pipeline
