#include <tenure/train/layer.h>

#include <tenure/train/hash.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

namespace tenure::train {
namespace {

constexpr double kDeviation = 0.02;

// The hash, then the finisher of SplitMix64: names that differ in one digit get unlike seeds.
uint64_t seed_of(uint64_t seed, std::string_view name) {
  auto hash = hash_of(name.data(), name.size());
  hash += (seed + 1) * 0x9e3779b97f4a7c15;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
  return hash ^ (hash >> 31);
}

double deviation_of(Begin begin, int64_t layers) {
  switch (begin) {
    case Begin::zeros:
    case Begin::ones:
      return 0;
    case Begin::normal:
      return kDeviation;
    case Begin::residual:
      return kDeviation / std::sqrt(2.0 * static_cast<double>(layers));
  }
  return 0;
}

}  // namespace

Layer::Layer(const ModelConfig& config, std::string prefix, at::Device device)
    : prefix_(std::move(prefix)), device_(device), model_layers_(config.layers) {}

at::Tensor Layer::add_weight(const std::string& name, at::IntArrayRef shape, Begin begin) {
  auto registered = name;
  std::ranges::replace(registered, '.', '_');
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device_);
  auto value = register_parameter(registered, at::empty(shape, options));
  weights_.push_back({prefix_ + name, value, deviation_of(begin, model_layers_),
                      begin == Begin::ones ? 1.0 : 0.0});
  return value;
}

void Layer::initialize(uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (auto& weight : weights_) {
    if (weight.deviation == 0) {
      weight.value.fill_(weight.mean);
      continue;
    }
    const auto options = at::TensorOptions().dtype(at::kFloat);
    auto values = at::empty(weight.value.sizes(), options);
    values.normal_(weight.mean, weight.deviation,
                   at::make_generator<at::CPUGeneratorImpl>(seed_of(seed, weight.name)));
    weight.value.copy_(values);
  }
}

// Note [Odd vocabularies]
// GPT-2 has 50,257 tokens. Where a size is no multiple of 8 CUDA's matrix products take kernels of
// an older kind: on an H200 those of the head took half of a step, 62 of 132 ms at 124M. Rows of
// zeros are added to the matrix, and their logits are left out again.
at::Tensor logits_of(const at::Tensor& x, const at::Tensor& matrix) {
  constexpr int64_t multiple = 64;
  const auto missing = (multiple - matrix.size(0) % multiple) % multiple;
  if (!x.is_cuda() || missing == 0) {
    return at::linear(x, matrix);
  }
  const auto padded = at::constant_pad_nd(matrix, {0, 0, 0, missing});
  return at::linear(x, padded).narrow(-1, 0, matrix.size(0));
}

}  // namespace tenure::train
