#include <tenure/train/config.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <array>

namespace tenure::train {
namespace {

struct NamedConfig {
  std::string_view name;
  ModelConfig config;
};

constexpr int64_t kBytes = 256;
constexpr int64_t kGpt2Vocab = 50'257;
constexpr int64_t kGpt2Context = 1024;
constexpr int64_t kLlamaVocab = 128'256;
constexpr int64_t kLlamaContext = 131'072;

ModelConfig gpt2(int64_t layers, int64_t heads, int64_t width, int64_t vocab = kGpt2Vocab,
                 int64_t context = kGpt2Context) {
  return {.kind = ModelKind::gpt2,
          .layers = layers,
          .heads = heads,
          .kv_heads = heads,
          .width = width,
          .hidden = 4 * width,
          .vocab = vocab,
          .context = context,
          .head = HeadKind::tied,
          .rope_scaling = std::nullopt};
}

struct LlamaShape {
  int64_t layers, heads, kv_heads, width, hidden;
};

ModelConfig llama(const LlamaShape& shape, HeadKind head, double factor) {
  return {.kind = ModelKind::llama,
          .layers = shape.layers,
          .heads = shape.heads,
          .kv_heads = shape.kv_heads,
          .width = shape.width,
          .hidden = shape.hidden,
          .vocab = kLlamaVocab,
          .context = kLlamaContext,
          .head = head,
          .rope_scaling = RopeScaling{.factor = factor}};
}

ModelConfig tiny_llama() {
  auto config = llama({4, 4, 2, 128, 384}, HeadKind::untied, 1);
  config.vocab = kBytes;
  config.context = 256;
  config.rope_scaling.reset();
  return config;
}

std::vector<NamedConfig> named(ModelKind kind) {
  if (kind == ModelKind::gpt2) {
    return {{"tiny", gpt2(4, 4, 128, kBytes, 256)},
            {"124M", gpt2(12, 12, 768)},
            {"350M", gpt2(24, 16, 1024)},
            {"774M", gpt2(36, 20, 1280)},
            {"1558M", gpt2(48, 25, 1600)}};
  }
  // Llama 3.2 at 1B and 3B, 3.1 at 8B.
  return {{"tiny", tiny_llama()},
          {"1B", llama({16, 32, 8, 2048, 8192}, HeadKind::tied, 32)},
          {"3B", llama({28, 24, 8, 3072, 8192}, HeadKind::tied, 32)},
          {"8B", llama({32, 32, 8, 4096, 14336}, HeadKind::untied, 8)}};
}

std::string listed(const std::vector<std::string>& names) {
  std::string out;
  for (const auto& name : names) {
    out += text(out.empty() ? "" : ", ", name);
  }
  return out;
}

}  // namespace

ModelKind kind_named(std::string_view name) {
  for (const auto kind : {ModelKind::gpt2, ModelKind::llama}) {
    if (name_of(kind) == name) {
      return kind;
    }
  }
  throw InputError(text("there is no model \"", name, "\": the models are gpt2 and llama."));
}

std::string_view name_of(ModelKind kind) { return kind == ModelKind::gpt2 ? "gpt2" : "llama"; }

std::vector<std::string> size_names(ModelKind kind) {
  std::vector<std::string> names;
  for (const auto& [name, config] : named(kind)) {
    names.emplace_back(name);
  }
  return names;
}

ModelConfig config_named(ModelKind kind, std::string_view size) {
  for (const auto& [name, config] : named(kind)) {
    if (name == size) {
      return config;
    }
  }
  throw InputError(text(name_of(kind), " has no size \"", size, "\": its sizes are ",
                        listed(size_names(kind)), "."));
}

void check(const ModelConfig& config) {
  struct Figure {
    std::string_view name;
    int64_t value;
  };
  const std::array figures{Figure{"layers", config.layers},     Figure{"heads", config.heads},
                           Figure{"kv_heads", config.kv_heads}, Figure{"width", config.width},
                           Figure{"hidden", config.hidden},     Figure{"vocab", config.vocab},
                           Figure{"context", config.context}};
  for (const auto& [name, value] : figures) {
    if (value < 1) {
      throw InputError(text("a model needs at least 1 ", name, ", not ", value, "."));
    }
  }
  if (config.width % config.heads != 0) {
    throw InputError(text("the width ", config.width, " cannot be divided into ", config.heads,
                          " heads of equal width."));
  }
  if (config.heads % config.kv_heads != 0) {
    throw InputError(text("the ", config.heads, " heads cannot be divided into ", config.kv_heads,
                          " groups of equal size: take a kv_heads that divides heads."));
  }
  if (config.kind == ModelKind::gpt2 && config.heads != config.kv_heads) {
    throw InputError(text("GPT-2 has no groups of heads: kv_heads must be ", config.heads, "."));
  }
  if (config.kind == ModelKind::llama && config.head_width() % 2 != 0) {
    throw InputError(text("RoPE turns pairs, and a head is ", config.head_width(),
                          " wide: take a width that gives heads an even one."));
  }
}

}  // namespace tenure::train
