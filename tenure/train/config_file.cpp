// The half of config.h that knows Hugging Face's config.json.
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/train/config.h>
#include <tenure/train/input_file.h>
#include <tenure/train/json.h>
#include <tenure/train/new_file.h>

namespace tenure::train {
namespace {

constexpr int64_t kGpt2End = 50'256;
constexpr int64_t kLlamaBegin = 128'000;
constexpr int64_t kLlamaEnd = 128'001;

// The members of one object of the file, each of the type that is asked for.
class Members {
 public:
  Members(const Json& json, const std::string& path) : json_(&json), path_(&path) {
    if (json.object() == nullptr) {
      throw InputError(text(path, " is no model configuration: it is not a JSON object."));
    }
  }

  bool has(std::string_view name) const { return json_->find(name) != nullptr; }

  int64_t integer(std::string_view name) const {
    const auto* value = json_->find(name);
    if (value == nullptr || value->integer() == nullptr) {
      refuse(name, "an integer");
    }
    return *value->integer();
  }
  int64_t integer_or(std::string_view name, int64_t otherwise) const {
    return has(name) ? integer(name) : otherwise;
  }

  double real(std::string_view name) const {
    const auto* value = json_->find(name);
    if (value != nullptr && value->integer() != nullptr) {
      return static_cast<double>(*value->integer());
    }
    if (value == nullptr || value->real() == nullptr) {
      refuse(name, "a number");
    }
    return *value->real();
  }
  double real_or(std::string_view name, double otherwise) const {
    return has(name) ? real(name) : otherwise;
  }

  std::string string_or(std::string_view name, const char* otherwise) const {
    const auto* value = json_->find(name);
    if (value == nullptr) {
      return otherwise;
    }
    if (value->string() == nullptr) {
      refuse(name, "a string");
    }
    return *value->string();
  }

  bool boolean_or(std::string_view name, bool otherwise) const {
    const auto* value = json_->find(name);
    if (value == nullptr) {
      return otherwise;
    }
    if (value->boolean() == nullptr) {
      refuse(name, "true or false");
    }
    return *value->boolean();
  }

  Members members(std::string_view name) const { return {*json_->find(name), *path_}; }

  void demand(bool holds, std::string_view what) const {
    if (!holds) {
      throw InputError(text(*path_, " describes a model with ", what,
                            ", which Tenure's GPT-2 and Llama do not have."));
    }
  }

 private:
  [[noreturn]] void refuse(std::string_view name, std::string_view wanted) const {
    throw InputError(text(*path_, ": \"", name, "\" must be ", wanted, "."));
  }

  const Json* json_;
  const std::string* path_;
};

HeadKind head_of(const Members& file, bool tied_by_default) {
  return file.boolean_or("tie_word_embeddings", tied_by_default) ? HeadKind::tied
                                                                 : HeadKind::untied;
}

ModelConfig read_gpt2(const Members& file) {
  ModelConfig config;
  config.kind = ModelKind::gpt2;
  config.layers = file.integer("n_layer");
  config.heads = config.kv_heads = file.integer("n_head");
  config.width = file.integer("n_embd");
  config.hidden = file.integer_or("n_inner", 4 * config.width);
  config.vocab = file.integer("vocab_size");
  config.context = file.integer("n_positions");
  config.norm_eps = file.real_or("layer_norm_epsilon", config.norm_eps);
  config.head = head_of(file, true);
  const auto activation = file.string_or("activation_function", "gelu_new");
  file.demand(activation == "gelu_new" || activation == "gelu_pytorch_tanh",
              text("the activation ", activation));
  file.demand(!file.boolean_or("add_cross_attention", false), "cross attention");
  file.demand(!file.boolean_or("scale_attn_by_inverse_layer_idx", false) &&
                  file.boolean_or("scale_attn_weights", true),
              "attention of another scale");
  return config;
}

// Today `rope_parameters` holds the base, too; until transformers 4 `rope_scaling` stood beside it.
void read_rope(const Members& file, ModelConfig& config) {
  config.rope_theta = file.real_or("rope_theta", 10'000);
  const auto* name = file.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!file.has(name)) {
    return;
  }
  const auto rope = file.members(name);
  config.rope_theta = rope.real_or("rope_theta", config.rope_theta);
  // Its name until transformers 4.43 was `type`.
  const auto type = rope.string_or(rope.has("rope_type") ? "rope_type" : "type", "default");
  file.demand(type == "default" || type == "llama3", text("RoPE of type ", type));
  if (type == "llama3") {
    config.rope_scaling = RopeScaling{
        .factor = rope.real("factor"),
        .low = rope.real("low_freq_factor"),
        .high = rope.real("high_freq_factor"),
        .original_context = rope.integer("original_max_position_embeddings"),
    };
  }
}

ModelConfig read_llama(const Members& file) {
  ModelConfig config;
  config.kind = ModelKind::llama;
  config.layers = file.integer("num_hidden_layers");
  config.heads = file.integer("num_attention_heads");
  config.kv_heads = file.integer_or("num_key_value_heads", config.heads);
  config.width = file.integer("hidden_size");
  config.hidden = file.integer("intermediate_size");
  config.vocab = file.integer("vocab_size");
  config.context = file.integer("max_position_embeddings");
  config.norm_eps = file.real_or("rms_norm_eps", 1e-6);
  config.head = head_of(file, false);
  read_rope(file, config);
  const auto activation = file.string_or("hidden_act", "silu");
  file.demand(activation == "silu", text("the activation ", activation));
  file.demand(!file.boolean_or("attention_bias", false) && !file.boolean_or("mlp_bias", false),
              "biases in a Llama");
  file.demand(config.heads < 1 || !file.has("head_dim") ||
                  file.integer("head_dim") * config.heads == config.width,
              "heads that are together not as wide as the model");
  return config;
}

Json::Object gpt2_members(const ModelConfig& config) {
  return {{"architectures", Json::Array{"GPT2LMHeadModel"}},
          {"model_type", "gpt2"},
          {"n_layer", config.layers},
          {"n_head", config.heads},
          {"n_embd", config.width},
          {"n_inner", config.hidden},
          {"vocab_size", config.vocab},
          {"n_positions", config.context},
          {"layer_norm_epsilon", config.norm_eps},
          {"activation_function", "gelu_new"},
          // Ours has no dropout. Hugging Face's, unless told, has 0.1.
          {"resid_pdrop", 0.0},
          {"embd_pdrop", 0.0},
          {"attn_pdrop", 0.0}};
}

Json::Object llama_members(const ModelConfig& config) {
  Json::Object rope{{"rope_type", config.rope_scaling ? "llama3" : "default"},
                    {"rope_theta", config.rope_theta}};
  if (const auto& scaling = config.rope_scaling) {
    rope.insert(rope.end(), {{"factor", scaling->factor},
                             {"low_freq_factor", scaling->low},
                             {"high_freq_factor", scaling->high},
                             {"original_max_position_embeddings", scaling->original_context}});
  }
  return {{"architectures", Json::Array{"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"num_hidden_layers", config.layers},
          {"num_attention_heads", config.heads},
          {"num_key_value_heads", config.kv_heads},
          {"hidden_size", config.width},
          {"intermediate_size", config.hidden},
          {"vocab_size", config.vocab},
          {"max_position_embeddings", config.context},
          {"rms_norm_eps", config.norm_eps},
          {"hidden_act", "silu"},
          {"rope_theta", config.rope_theta},
          {"rope_parameters", std::move(rope)}};
}

// Of the models' own tokenizers; with bytes as tokens there are none, and Hugging Face's defaults
// would lie beyond the vocabulary.
void add_special_tokens(Json::Object& members, const ModelConfig& config) {
  const bool is_gpt2 = config.kind == ModelKind::gpt2;
  const auto token = [&](int64_t number) { return number < config.vocab ? Json(number) : Json(); };
  members.emplace_back("bos_token_id", token(is_gpt2 ? kGpt2End : kLlamaBegin));
  members.emplace_back("eos_token_id", token(is_gpt2 ? kGpt2End : kLlamaEnd));
}

}  // namespace

ModelConfig read_config(const std::string& path) {
  const auto json = Json::parse(read_whole(path), path);
  const Members file(json, path);
  const auto type = file.string_or("model_type", "");
  if (type != "gpt2" && type != "llama") {
    throw InputError(
        text(path, " describes a model of type \"", type, "\": Tenure trains gpt2 and llama."));
  }
  auto config = type == "gpt2" ? read_gpt2(file) : read_llama(file);
  check(config);
  return config;
}

void write_config(const std::string& path, const ModelConfig& config) {
  auto members = config.kind == ModelKind::gpt2 ? gpt2_members(config) : llama_members(config);
  members.emplace_back("tie_word_embeddings", config.head == HeadKind::tied);
  add_special_tokens(members, config);
  write_whole(path, Json(std::move(members)).dump(Json::Layout::indented) + "\n");
}

}  // namespace tenure::train
