// Stage: the layers [first, last) of a GPT-2 or a Llama, with the embedding if it has the first
// and with final norm and head if it has the last. A whole model is the stage with all layers.
//
//   auto stage = std::make_shared<Stage>(config, LayerRange{0, 6});
//   stage->initialize(1337);
//   const auto hidden = stage->forward(tokens);
//
// Weights are fp32 (to() changes that) and have no values until initialize() or a load.
//
// One thread at a time.
#pragma once

#include <tenure/train/config.h>
#include <tenure/train/layer.h>
#include <tenure/train/split.h>
#include <tenure/train/weights.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tenure::train {

class Stage : public torch::nn::Module {
 public:
  // Throws InputError for a configuration or a range that makes no stage. On the meta device it
  // costs no memory: for names and sizes.
  Stage(const ModelConfig& config, LayerRange range, at::Device device = at::kCPU);

  const ModelConfig& config() const { return config_; }
  LayerRange range() const { return range_; }
  bool is_first() const { return range_.first == 0; }
  bool is_last() const { return range_.last == config_.layers; }

  // See Note [A weight begins the same everywhere].
  void initialize(uint64_t seed);

  // Tokens [B, T] of int64 in the first stage, hidden [B, T, C] in the others; logits [B, T, V] out
  // of the last, hidden out of the others. Throws InputError for another shape or type, and for a
  // sequence longer than the model's context.
  at::Tensor forward(const at::Tensor& x);

  // What forward runs, in order, for who runs more around each of them: sharding, recomputing.
  // With a tied head in the same stage, the last of them uses a weight of the first.
  const std::vector<std::shared_ptr<Layer>>& layers() const { return layers_; }

  // The parameters, each once, under Hugging Face's names, with layers counted in the whole model.
  Weights named_weights() const;

  // Where head and embedding are tied and in different stages, each of the two has a copy of the
  // matrix under the embedding's name, with equal values as long as every update uses the sum of
  // both gradients: whoever trains adds these up. Nothing in all other stages.
  std::optional<at::Tensor> tied_weight() const { return tied_; }

 private:
  template <class Embedding, class Head, class MakeBlock>
  void build(at::Device device, const MakeBlock& make_block);
  void add(std::shared_ptr<Layer> layer);
  void check_input(const at::Tensor& x) const;

  ModelConfig config_;
  LayerRange range_;
  std::vector<std::shared_ptr<Layer>> layers_;  // shared with torch's list of submodules
  std::optional<at::Tensor> tied_;
};

// The name of the matrix that turns tokens into vectors, and of a head that is tied to it.
std::string embedding_name(ModelKind kind);

// The names of all weights of the whole model.
std::vector<std::string> weight_names(const ModelConfig& config);

// Mean cross entropy of logits [B, T, V] against targets [B, T], in fp32. Targets of -100 do not
// count.
at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace tenure::train
