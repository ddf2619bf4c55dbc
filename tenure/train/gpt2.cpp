#include <tenure/train/gpt2.h>

#include <tenure/core/text.h>

#include <ATen/ops/addmm.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>

namespace tenure::train {
namespace {

at::Tensor norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  return at::layer_norm(x, weight.sizes(), weight, bias, eps);
}

// at::linear for a matrix that is [in, out].
at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(1);
  return at::addmm(bias, x.reshape({-1, weight.size(0)}), weight).view(sizes);
}

}  // namespace

Gpt2Embedding::Gpt2Embedding(const ModelConfig& config, at::Device device)
    : Layer(config, "transformer.", device),
      tokens_(add_weight("wte.weight", {config.vocab, config.width}, Begin::normal)),
      positions_(add_weight("wpe.weight", {config.context, config.width}, Begin::normal)) {}

at::Tensor Gpt2Embedding::forward(const at::Tensor& tokens) {
  return at::embedding(tokens_, tokens) + positions_.narrow(0, 0, tokens.size(1));
}

Gpt2Block::Gpt2Block(const ModelConfig& config, int64_t number, at::Device device)
    : Layer(config, text("transformer.h.", number, "."), device),
      heads_(config.heads),
      eps_(config.norm_eps),
      norm_1_weight_(add_weight("ln_1.weight", {config.width}, Begin::ones)),
      norm_1_bias_(add_weight("ln_1.bias", {config.width}, Begin::zeros)),
      qkv_weight_(
          add_weight("attn.c_attn.weight", {config.width, 3 * config.width}, Begin::normal)),
      qkv_bias_(add_weight("attn.c_attn.bias", {3 * config.width}, Begin::zeros)),
      out_weight_(add_weight("attn.c_proj.weight", {config.width, config.width}, Begin::residual)),
      out_bias_(add_weight("attn.c_proj.bias", {config.width}, Begin::zeros)),
      norm_2_weight_(add_weight("ln_2.weight", {config.width}, Begin::ones)),
      norm_2_bias_(add_weight("ln_2.bias", {config.width}, Begin::zeros)),
      up_weight_(add_weight("mlp.c_fc.weight", {config.width, config.hidden}, Begin::normal)),
      up_bias_(add_weight("mlp.c_fc.bias", {config.hidden}, Begin::zeros)),
      down_weight_(add_weight("mlp.c_proj.weight", {config.hidden, config.width}, Begin::residual)),
      down_bias_(add_weight("mlp.c_proj.bias", {config.width}, Begin::zeros)) {}

at::Tensor Gpt2Block::forward(const at::Tensor& x) {
  const auto attended = x + attention(norm(x, norm_1_weight_, norm_1_bias_, eps_));
  return attended + mlp(norm(attended, norm_2_weight_, norm_2_bias_, eps_));
}

at::Tensor Gpt2Block::attention(const at::Tensor& x) const {
  const auto batch = x.size(0);
  const auto length = x.size(1);
  const auto width = x.size(2);
  const auto parts = project(x, qkv_weight_, qkv_bias_).split(width, 2);
  const auto by_head = [&](const at::Tensor& part) {
    return part.view({batch, length, heads_, width / heads_}).transpose(1, 2);
  };
  const auto mixed = at::scaled_dot_product_attention(
      by_head(parts[0]), by_head(parts[1]), by_head(parts[2]), {}, 0.0, /*is_causal=*/true);
  return project(mixed.transpose(1, 2).reshape({batch, length, width}), out_weight_, out_bias_);
}

at::Tensor Gpt2Block::mlp(const at::Tensor& x) const {
  return project(at::gelu(project(x, up_weight_, up_bias_), "tanh"), down_weight_, down_bias_);
}

Gpt2Head::Gpt2Head(const ModelConfig& config, const at::Tensor& tied, at::Device device)
    : Layer(config, "", device),
      eps_(config.norm_eps),
      norm_weight_(add_weight("transformer.ln_f.weight", {config.width}, Begin::ones)),
      norm_bias_(add_weight("transformer.ln_f.bias", {config.width}, Begin::zeros)),
      matrix_(tied.defined() ? tied
                             : add_weight(config.head == HeadKind::tied ? "transformer.wte.weight"
                                                                        : "lm_head.weight",
                                          {config.vocab, config.width}, Begin::normal)) {}

at::Tensor Gpt2Head::forward(const at::Tensor& x) {
  return logits_of(norm(x, norm_weight_, norm_bias_, eps_), matrix_);
}

}  // namespace tenure::train
