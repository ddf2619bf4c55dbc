#include <tenure/train/llama.h>

#include <tenure/core/text.h>

#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

#include <utility>

namespace tenure::train {
namespace {

at::Tensor norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return at::rms_norm(x, weight.sizes(), weight, eps);
}

}  // namespace

LlamaEmbedding::LlamaEmbedding(const ModelConfig& config, at::Device device)
    : Layer(config, "model.", device),
      tokens_(add_weight("embed_tokens.weight", {config.vocab, config.width}, Begin::normal)) {}

at::Tensor LlamaEmbedding::forward(const at::Tensor& tokens) {
  return at::embedding(tokens_, tokens);
}

LlamaBlock::LlamaBlock(const ModelConfig& config, int64_t number, std::shared_ptr<Rope> rope,
                       at::Device device)
    : Layer(config, text("model.layers.", number, "."), device),
      heads_(config.heads),
      kv_heads_(config.kv_heads),
      eps_(config.norm_eps),
      rope_(std::move(rope)),
      norm_1_(add_weight("input_layernorm.weight", {config.width}, Begin::ones)),
      q_(add_weight("self_attn.q_proj.weight", {config.width, config.width}, Begin::normal)),
      k_(add_weight("self_attn.k_proj.weight",
                    {config.kv_heads * config.head_width(), config.width}, Begin::normal)),
      v_(add_weight("self_attn.v_proj.weight",
                    {config.kv_heads * config.head_width(), config.width}, Begin::normal)),
      out_(add_weight("self_attn.o_proj.weight", {config.width, config.width}, Begin::normal)),
      norm_2_(add_weight("post_attention_layernorm.weight", {config.width}, Begin::ones)),
      gate_(add_weight("mlp.gate_proj.weight", {config.hidden, config.width}, Begin::normal)),
      up_(add_weight("mlp.up_proj.weight", {config.hidden, config.width}, Begin::normal)),
      down_(add_weight("mlp.down_proj.weight", {config.width, config.hidden}, Begin::normal)) {}

at::Tensor LlamaBlock::forward(const at::Tensor& x) {
  const auto attended = x + attention(norm(x, norm_1_, eps_));
  return attended + mlp(norm(attended, norm_2_, eps_));
}

at::Tensor LlamaBlock::attention(const at::Tensor& x) const {
  const auto batch = x.size(0);
  const auto length = x.size(1);
  const auto width = x.size(2);
  const auto by_head = [&](const at::Tensor& matrix, int64_t heads) {
    return at::linear(x, matrix).view({batch, length, heads, width / heads_}).transpose(1, 2);
  };
  const auto mixed = at::scaled_dot_product_attention(
      rope_->turn(by_head(q_, heads_)), rope_->turn(by_head(k_, kv_heads_)), by_head(v_, kv_heads_),
      {}, 0.0, /*is_causal=*/true, std::nullopt,
      /*enable_gqa=*/heads_ != kv_heads_);
  return at::linear(mixed.transpose(1, 2).reshape({batch, length, width}), out_);
}

at::Tensor LlamaBlock::mlp(const at::Tensor& x) const {
  return at::linear(at::silu(at::linear(x, gate_)) * at::linear(x, up_), down_);
}

LlamaHead::LlamaHead(const ModelConfig& config, const at::Tensor& tied, at::Device device)
    : Layer(config, "", device),
      eps_(config.norm_eps),
      norm_(add_weight("model.norm.weight", {config.width}, Begin::ones)),
      matrix_(tied.defined()
                  ? tied
                  : add_weight(config.head == HeadKind::tied ? "model.embed_tokens.weight"
                                                             : "lm_head.weight",
                               {config.vocab, config.width}, Begin::normal)) {}

at::Tensor LlamaHead::forward(const at::Tensor& x) {
  return logits_of(norm(x, norm_, eps_), matrix_);
}

}  // namespace tenure::train
