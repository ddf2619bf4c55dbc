// GPT-2's layers: token and position embedding; blocks of LayerNorm, attention of many heads and
// an MLP with GELU (tanh); final LayerNorm and head. Matrices are [in, out], as in OpenAI's files
// and Hugging Face's Conv1D.
#pragma once

#include <tenure/train/config.h>
#include <tenure/train/layer.h>

#include <cstdint>

namespace tenure::train {

// Tokens [B, T] -> [B, T, C].
class Gpt2Embedding : public Layer {
 public:
  Gpt2Embedding(const ModelConfig& config, at::Device device);
  at::Tensor forward(const at::Tensor& tokens) override;
  const at::Tensor& matrix() const { return tokens_; }

 private:
  at::Tensor tokens_;
  at::Tensor positions_;
};

// [B, T, C] -> [B, T, C].
class Gpt2Block : public Layer {
 public:
  Gpt2Block(const ModelConfig& config, int64_t number, at::Device device);
  at::Tensor forward(const at::Tensor& x) override;

 private:
  at::Tensor attention(const at::Tensor& x) const;
  at::Tensor mlp(const at::Tensor& x) const;

  int64_t heads_;
  double eps_;
  at::Tensor norm_1_weight_, norm_1_bias_;
  at::Tensor qkv_weight_, qkv_bias_;
  at::Tensor out_weight_, out_bias_;
  at::Tensor norm_2_weight_, norm_2_bias_;
  at::Tensor up_weight_, up_bias_;
  at::Tensor down_weight_, down_bias_;
};

// [B, T, C] -> logits [B, T, V].
class Gpt2Head : public Layer {
 public:
  // `tied` is the embedding's matrix where that is in the same stage; undefined: the head has a
  // matrix of its own, under the embedding's name where the model is tied.
  Gpt2Head(const ModelConfig& config, const at::Tensor& tied, at::Device device);
  at::Tensor forward(const at::Tensor& x) override;
  const at::Tensor& matrix() const { return matrix_; }

 private:
  double eps_;
  at::Tensor norm_weight_, norm_bias_;
  at::Tensor matrix_;
};

}  // namespace tenure::train
