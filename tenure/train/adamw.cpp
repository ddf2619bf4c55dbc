#include <tenure/train/adamw.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <map>
#include <string_view>
#include <tuple>
#include <utility>

namespace tenure::train {
namespace {

constexpr std::string_view kAverage = "exp_avg.";
constexpr std::string_view kSquares = "exp_avg_sq.";
constexpr std::string_view kStep = "step.";

at::Tensor new_step(const at::Tensor& like) {
  return at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(like.device()));
}

}  // namespace

// What one call of the kernel takes: one device, one type, one decay.
struct AdamW::Group {
  std::vector<at::Tensor> values, gradients, averages, squares, steps;
};

Decay decay_of(const at::Tensor& weight) {
  return weight.dim() >= 2 ? Decay::as_matrix : Decay::none;
}

AdamW::AdamW(std::vector<Parameter> parameters, const AdamWOptions& options)
    : parameters_(std::move(parameters)), options_(options) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, value, decay] : parameters_) {
    states_.push_back({at::zeros_like(value), at::zeros_like(value), new_step(value)});
  }
}

void AdamW::step(double learning_rate) {
  const at::NoGradGuard no_grad;
  // Devices are not ordered: their printed names are.
  std::map<std::tuple<Decay, std::string, at::ScalarType>, Group> groups;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, value, decay] = parameters_[i];
    if (!value.grad().defined()) {
      continue;
    }
    const auto& state = states_[i];
    auto& group = groups[{decay, value.device().str(), value.scalar_type()}];
    group.values.push_back(value);
    group.gradients.push_back(value.grad());
    group.averages.push_back(state.exp_avg);
    group.squares.push_back(state.exp_avg_sq);
    group.steps.push_back(state.step);
  }
  for (auto& [key, group] : groups) {
    const auto decay = std::get<Decay>(key) == Decay::as_matrix ? options_.weight_decay : 0.0;
    at::_foreach_add_(group.steps, 1);
    at::_fused_adamw_(group.values, group.gradients, group.averages, group.squares, {}, group.steps,
                      learning_rate, options_.beta1, options_.beta2, decay, options_.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
}

void AdamW::zero_grad() {
  for (auto& parameter : parameters_) {
    parameter.value.mutable_grad().reset();
  }
}

Weights AdamW::state() const {
  Weights out;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& name = parameters_[i].name;
    out.emplace_back(text(kAverage, name), states_[i].exp_avg);
    out.emplace_back(text(kSquares, name), states_[i].exp_avg_sq);
    out.emplace_back(text(kStep, name), states_[i].step);
  }
  return out;
}

void AdamW::load_state(const Weights& state) {
  std::map<std::string, at::Tensor> given(state.begin(), state.end());
  Weights to = this->state();
  for (const auto& [name, value] : to) {
    const auto found = given.find(name);
    if (found == given.end()) {
      throw InputError(text("the optimizer's state has no \"", name, "\"."));
    }
    if (found->second.sizes() != value.sizes()) {
      throw InputError(text("the optimizer's state \"", name, "\" is ", found->second.sizes(),
                            ", and the parameter needs ", value.sizes(), "."));
    }
  }
  if (given.size() > to.size()) {
    for (const auto& [name, value] : to) {
      given.erase(name);
    }
    throw InputError(
        text("the optimizer's state \"", given.begin()->first, "\" belongs to no parameter."));
  }
  const at::NoGradGuard no_grad;
  for (auto& [name, value] : to) {
    value.copy_(given.at(name));
  }
}

}  // namespace tenure::train
