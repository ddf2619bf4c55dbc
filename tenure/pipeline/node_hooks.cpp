#include <tenure/pipeline/node_hooks.h>

namespace tenure::pipeline {

using torch::autograd::Node;

bool has_tensor_hooks(Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

bool is_hooked(Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() ||
         !node.post_hooks().empty() || !node.retains_grad_hooks().empty();
}

bool is_passed_by(Node& leaf) {
  return !leaf.pre_hooks().empty() || !leaf.post_hooks().empty() ||
         leaf.tensor_post_acc_grad_hooks() != nullptr;
}

WithoutTensorHooks::WithoutTensorHooks(const torch::autograd::edge_list& edges) {
  for (const auto& edge : edges) {
    auto& node = *edge.function;
    if (has_tensor_hooks(node)) {
      kept_.push_back({.node = edge.function,
                       .hooks = std::exchange(node.tensor_pre_hooks(), {}),
                       .retaining = std::exchange(node.retains_grad_hooks(), {})});
    }
  }
}

WithoutTensorHooks::~WithoutTensorHooks() {
  for (auto& one : kept_) {
    one.node->tensor_pre_hooks() = std::move(one.hooks);
    one.node->retains_grad_hooks() = std::move(one.retaining);
  }
}

}  // namespace tenure::pipeline
