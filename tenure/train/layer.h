// Layer: what a Stage runs one after the other: the embedding, each block, the head. A layer knows
// its weights by their global names, as in Hugging Face's files, and how each of them begins.
//
// Weights are ordinary parameters of a torch::nn module (under the same names with _ for a dot,
// which torch does not allow), so to(), zero_grad() and parameters() are as ever. A weight that
// another layer owns (a tied head) is a parameter of its owner alone.
//
// One thread at a time.
#pragma once

#include <tenure/train/config.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tenure::train {

// How a weight begins. residual: as normal, narrower the more layers add to the residual stream.
enum class Begin { zeros, ones, normal, residual };

class Layer : public torch::nn::Module {
 public:
  struct Weight {
    std::string name;
    at::Tensor value;
    double deviation;  // of the normal distribution it begins with; 0: it is the mean
    double mean;
  };

  // `prefix` comes before every weight's name: "transformer.h.3.".
  Layer(const ModelConfig& config, std::string prefix, at::Device device);

  virtual at::Tensor forward(const at::Tensor& x) = 0;

  const std::vector<Weight>& weights() const { return weights_; }

  // Note [A weight begins the same everywhere]
  // Every weight draws from a generator of its own, seeded by the seed and the weight's name, on
  // the host and in fp32. So its values do not depend on which layers a process has, on their
  // order, on the device or on the type they are rounded to; and two copies of a tied weight,
  // which have one name, are equal.
  void initialize(uint64_t seed);

 protected:
  // Without values; REQUIRES initialize() or a load before use.
  at::Tensor add_weight(const std::string& name, at::IntArrayRef shape, Begin begin);

 private:
  std::string prefix_;
  at::Device device_;
  int64_t model_layers_;
  std::vector<Weight> weights_;
};

// x times the transpose of a matrix [V, C], for any V. See Note [Odd vocabularies].
at::Tensor logits_of(const at::Tensor& x, const at::Tensor& matrix);

}  // namespace tenure::train
