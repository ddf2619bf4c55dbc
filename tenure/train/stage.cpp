#include <tenure/train/stage.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/train/gpt2.h>
#include <tenure/train/llama.h>

#include <ATen/ops/cross_entropy_loss.h>

#include <utility>

namespace tenure::train {
namespace {

constexpr int64_t kDoesNotCount = -100;

}  // namespace

Stage::Stage(const ModelConfig& config, LayerRange range, at::Device device)
    : config_(config), range_(range) {
  check(config);
  if (range.first < 0 || range.size() < 1 || range.last > config.layers) {
    throw InputError(text("a stage of layers [", range.first, ", ", range.last,
                          ") cannot be made of a model with ", config.layers, " layers."));
  }
  if (config.kind == ModelKind::gpt2) {
    build<Gpt2Embedding, Gpt2Head>(device, [&](int64_t number) {
      return std::make_shared<Gpt2Block>(config, number, device);
    });
  } else {
    const auto rope = std::make_shared<Rope>(config);
    build<LlamaEmbedding, LlamaHead>(device, [&](int64_t number) {
      return std::make_shared<LlamaBlock>(config, number, rope, device);
    });
  }
}

template <class Embedding, class Head, class MakeBlock>
void Stage::build(at::Device device, const MakeBlock& make_block) {
  const bool is_tied = config_.head == HeadKind::tied;
  at::Tensor embedded;
  if (is_first()) {
    const auto embedding = std::make_shared<Embedding>(config_, device);
    embedded = embedding->matrix();
    add(embedding);
  }
  for (auto number = range_.first; number < range_.last; ++number) {
    add(make_block(number));
  }
  at::Tensor read_out;
  if (is_last()) {
    const auto head = std::make_shared<Head>(config_, is_tied ? embedded : at::Tensor(), device);
    read_out = head->matrix();
    add(head);
  }
  if (is_tied && embedded.defined() != read_out.defined()) {
    tied_ = embedded.defined() ? embedded : read_out;
  }
}

void Stage::add(std::shared_ptr<Layer> layer) {
  register_module(text("layer_", layers_.size()), layer);
  layers_.push_back(std::move(layer));
}

void Stage::initialize(uint64_t seed) {
  for (const auto& layer : layers_) {
    layer->initialize(seed);
  }
}

at::Tensor Stage::forward(const at::Tensor& x) {
  check_input(x);
  auto out = x;
  for (const auto& layer : layers_) {
    out = layer->forward(out);
  }
  return out;
}

void Stage::check_input(const at::Tensor& x) const {
  const bool fits = is_first()
                        ? x.dim() == 2 && x.scalar_type() == at::kLong
                        : x.dim() == 3 && x.size(2) == config_.width && x.is_floating_point();
  if (!fits) {
    const auto wanted = is_first() ? std::string("tokens [batch, length] of int64")
                                   : text("hidden states [batch, length, ", config_.width, "]");
    throw InputError(text("the stage of layers [", range_.first, ", ", range_.last, ") takes ",
                          wanted, ", not ", x.sizes(), " of ", x.scalar_type(), "."));
  }
  if (x.size(1) > config_.context) {
    throw InputError(text("a sequence of ", x.size(1),
                          " tokens is longer than the model's context, ", config_.context, "."));
  }
}

Weights Stage::named_weights() const {
  Weights out;
  for (const auto& layer : layers_) {
    for (const auto& weight : layer->weights()) {
      out.emplace_back(weight.name, weight.value);
    }
  }
  return out;
}

std::string embedding_name(ModelKind kind) {
  return kind == ModelKind::gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight";
}

std::vector<std::string> weight_names(const ModelConfig& config) {
  std::vector<std::string> names;
  for (const auto& [name, value] : Stage(config, {0, config.layers}, at::kMeta).named_weights()) {
    names.push_back(name);
  }
  return names;
}

at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.to(at::kFloat).reshape({-1, logits.size(-1)}),
                                targets.reshape({-1}), {}, at::Reduction::Mean, kDoesNotCount);
}

}  // namespace tenure::train
