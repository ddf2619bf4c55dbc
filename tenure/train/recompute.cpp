#include <tenure/train/recompute.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <utility>

namespace tenure::train {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Again final : torch::CustomClassHolder {
  Again(Run again, std::vector<at::Tensor> of) : run(std::move(again)), weights(std::move(of)) {}
  Run run;
  std::vector<at::Tensor> weights;
};

// The weights are inputs, so that their gradients leave through this node, like any other's: the
// graph inside it lives only while it runs.
struct Recompute final : torch::autograd::Function<Recompute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                            const Run& run) {
    context->save_for_backward({x});
    context->saved_data["again"] =
        c10::IValue::make_capsule(c10::make_intrusive<Again>(run, weights.vec()));
    return run(x);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto capsule = context->saved_data["again"].toCapsule();
    const auto& again = static_cast<const Again&>(*capsule);
    const auto saved = context->get_saved_variables().front();
    const auto wanted = saved.requires_grad();
    auto x = saved.detach();
    variable_list inputs;
    if (wanted) {
      inputs.push_back(x.requires_grad_());
    }
    inputs.insert(inputs.end(), again.weights.begin(), again.weights.end());
    auto found = [&] {
      const at::AutoGradMode with_graph(true);
      const auto y = again.run(x);
      return torch::autograd::grad({y}, inputs, {gradients.front()}, /*retain_graph=*/false,
                                   /*create_graph=*/false, /*allow_unused=*/true);
    }();
    if (!wanted) {
      found.insert(found.begin(), at::Tensor());
    }
    found.emplace_back();  // of `run`
    return found;
  }
};

}  // namespace

at::Tensor recomputed(const Run& run, const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  return at::GradMode::is_enabled() ? Recompute::apply(x, at::TensorList(weights), run) : run(x);
}

}  // namespace tenure::train
