// ModelConfig: the figures that make a GPT-2 or a Llama, under our names; the sizes that have
// names; and Hugging Face's config.json, in which both are kept. Plain data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tenure::train {

enum class ModelKind { gpt2, llama };
enum class HeadKind { tied, untied };  // tied: the head is the embedding matrix

// Llama 3.1's stretch of the rotary frequencies to longer contexts, `rope_type: llama3` at Hugging
// Face: wavelengths beyond original_context / low are divided by the factor, those below
// original_context / high stay, and between them the two are blended.
struct RopeScaling {
  double factor = 8;
  double low = 1;
  double high = 4;
  int64_t original_context = 8192;

  bool operator==(const RopeScaling&) const = default;
};

struct ModelConfig {
  ModelKind kind = ModelKind::gpt2;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // as many as heads: no grouping; always so in GPT-2
  int64_t width = 0;
  int64_t hidden = 0;  // of the MLP
  int64_t vocab = 0;
  int64_t context = 0;  // the longest sequence
  double norm_eps = 1e-5;
  HeadKind head = HeadKind::tied;
  double rope_theta = 500'000;  // this and the next: Llama only
  std::optional<RopeScaling> rope_scaling;

  int64_t head_width() const { return width / heads; }
  bool operator==(const ModelConfig&) const = default;
};

// "gpt2" or "llama"; InputError for anything else.
ModelKind kind_named(std::string_view name);
std::string_view name_of(ModelKind kind);

// The sizes of a kind that have names, smallest first; "tiny" is ours and has bytes as tokens.
std::vector<std::string> size_names(ModelKind kind);
// Throws InputError, which lists the names there are.
ModelConfig config_named(ModelKind kind, std::string_view size);

// Throws InputError for figures that make no model: a width that the heads do not divide.
void check(const ModelConfig& config);

// Hugging Face's config.json. Reading throws InputError for a model that is neither of ours, or
// has something ours lack (biases in Llama, another activation, another kind of RoPE).
ModelConfig read_config(const std::string& path);
void write_config(const std::string& path, const ModelConfig& config);

}  // namespace tenure::train
