// Llama's layers: token embedding; blocks of RMSNorm, attention with RoPE and grouped keys and
// values, and a SwiGLU MLP; final RMSNorm and head. No biases; matrices are [out, in].
#pragma once

#include <tenure/train/config.h>
#include <tenure/train/layer.h>
#include <tenure/train/rope.h>

#include <cstdint>
#include <memory>

namespace tenure::train {

// Tokens [B, T] -> [B, T, C].
class LlamaEmbedding : public Layer {
 public:
  LlamaEmbedding(const ModelConfig& config, at::Device device);
  at::Tensor forward(const at::Tensor& tokens) override;
  const at::Tensor& matrix() const { return tokens_; }

 private:
  at::Tensor tokens_;
};

// [B, T, C] -> [B, T, C].
class LlamaBlock : public Layer {
 public:
  // Blocks of a stage share the tables of `rope`; whichever goes last takes them along.
  LlamaBlock(const ModelConfig& config, int64_t number, std::shared_ptr<Rope> rope,
             at::Device device);
  at::Tensor forward(const at::Tensor& x) override;

 private:
  at::Tensor attention(const at::Tensor& x) const;
  at::Tensor mlp(const at::Tensor& x) const;

  int64_t heads_;
  int64_t kv_heads_;
  double eps_;
  std::shared_ptr<Rope> rope_;
  at::Tensor norm_1_;
  at::Tensor q_, k_, v_, out_;
  at::Tensor norm_2_;
  at::Tensor gate_, up_, down_;
};

// [B, T, C] -> logits [B, T, V].
class LlamaHead : public Layer {
 public:
  // `tied`: as Gpt2Head's.
  LlamaHead(const ModelConfig& config, const at::Tensor& tied, at::Device device);
  at::Tensor forward(const at::Tensor& x) override;
  const at::Tensor& matrix() const { return matrix_; }

 private:
  double eps_;
  at::Tensor norm_;
  at::Tensor matrix_;
};

}  // namespace tenure::train
