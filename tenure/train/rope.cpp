#include <tenure/train/rope.h>

#include <tenure/offload/interpose.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/TensorAccessor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <c10/core/InferenceMode.h>

#include <numbers>

namespace tenure::train {
namespace {

double stretched(double frequency, const RopeScaling& scaling) {
  const auto wavelength = 2 * std::numbers::pi / frequency;
  const auto turns = static_cast<double>(scaling.original_context) / wavelength;
  if (turns < scaling.low) {
    return frequency / scaling.factor;
  }
  if (turns > scaling.high) {
    return frequency;
  }
  const auto kept = (turns - scaling.low) / (scaling.high - scaling.low);
  return (1 - kept) * frequency / scaling.factor + kept * frequency;
}

}  // namespace

at::Tensor rope_frequencies(const ModelConfig& config) {
  const at::NoGradGuard no_grad;
  const auto width = config.head_width();
  const auto exponents = at::arange(0, width, 2, at::kFloat) / static_cast<double>(width);
  auto out = at::pow(config.rope_theta, exponents).reciprocal_();
  if (config.rope_scaling) {
    auto each = out.accessor<float, 1>();
    for (int64_t i = 0; i < each.size(0); ++i) {
      each[i] = static_cast<float>(stretched(each[i], *config.rope_scaling));
    }
  }
  return out;
}

at::Tensor Rope::turn(const at::Tensor& x) {
  tabulate(x);
  const auto halves = x.chunk(2, -1);
  const auto length = x.size(-2);
  return x * cos_.narrow(0, 0, length) +
         at::cat({-halves[1], halves[0]}, -1) * sin_.narrow(0, 0, length);
}

void Rope::tabulate(const at::Tensor& like) {
  const auto length = like.size(-2);
  if (cos_.defined() && cos_.size(0) >= length && cos_.device() == like.device() &&
      cos_.scalar_type() == like.scalar_type()) {
    return;
  }
  // Backward saves the tables, and refuses what was made in inference mode.
  const c10::InferenceMode not_inference(false);
  const at::NoGradGuard no_grad;
  // Made in one step and used in many: a plan of what a step calls is not to have it.
  const offload::Plainly unseen;
  const auto options = at::TensorOptions().dtype(at::kFloat).device(like.device());
  const auto pairs = frequencies_.to(like.device());
  const auto angles = at::outer(at::arange(length, options), pairs);
  const auto both = at::cat({angles, angles}, -1);
  cos_ = both.cos().to(like.scalar_type());
  sin_ = both.sin().to(like.scalar_type());
}

}  // namespace tenure::train
