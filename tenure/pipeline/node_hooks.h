// Hooks on nodes of autograd's graph: which there are, and those that the halves of a backward set
// and pass over. While nobody else runs or changes the graph.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace tenure::pipeline {

// On a tensor: they run when a gradient for it is there, also where it is only asked for.
bool has_tensor_hooks(torch::autograd::Node& node);
// Of any kind, but for those that run after a leaf has its gradient.
bool is_hooked(torch::autograd::Node& node);
// Whether a gradient of a leaf that is asked for passes it by: it would pass these hooks on its way
// into `.grad`.
bool is_passed_by(torch::autograd::Node& leaf);

// What a node is given in a backward.
class KeepGiven : public torch::autograd::FunctionPreHook {
 public:
  explicit KeepGiven(std::shared_ptr<torch::autograd::variable_list> given)
      : given_(std::move(given)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    *given_ = gradients;
    return gradients;
  }

 private:
  std::shared_ptr<torch::autograd::variable_list> given_;  // the graph may outlive who asks
};

// In its lifetime hooks on these nodes' tensors do not run: they have, when the gradients were
// asked for that are to go on from there.
class WithoutTensorHooks {
 public:
  explicit WithoutTensorHooks(const torch::autograd::edge_list& edges);
  WithoutTensorHooks(const WithoutTensorHooks&) = delete;
  WithoutTensorHooks& operator=(const WithoutTensorHooks&) = delete;
  ~WithoutTensorHooks();

 private:
  struct Kept {
    decltype(torch::autograd::Edge::function) node;
    std::decay_t<decltype(std::declval<torch::autograd::Node&>().tensor_pre_hooks())> hooks;
    std::decay_t<decltype(std::declval<torch::autograd::Node&>().retains_grad_hooks())> retaining;
  };
  std::vector<Kept> kept_;
};

// What a node has saved goes when it has run, though the graph is kept for others.
class ReleaseSaved : public torch::autograd::FunctionPostHook {
 public:
  explicit ReleaseSaved(torch::autograd::Node& node) : node_(node) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*inputs*/) override {
    node_.release_variables();
    return outputs;
  }

 private:
  torch::autograd::Node& node_;  // has this
};

}  // namespace tenure::pipeline
