#include <tenure/pipeline/backward.h>

#include <tenure/core/names.h>
#include <tenure/core/owner.h>
#include <tenure/core/scope.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

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

  std::vector<at::Tensor> first_half() {
    return backward.run_inputs(gradients, intern_owner(OwnerKind::gradient, "test"),
                               ScopeId::process, Halves::if_plain);
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

}  // namespace
}  // namespace tenure::pipeline
