#include <tenure/train/layer.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

namespace tenure::train {
namespace {

constexpr double kDeviation = 0.02;

// FNV-1a, then the finisher of SplitMix64: names that differ in one digit get unlike seeds.
uint64_t seed_of(uint64_t seed, std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char next : name) {
    hash = (hash ^ static_cast<unsigned char>(next)) * 0x100000001b3;
  }
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

}  // namespace tenure::train
