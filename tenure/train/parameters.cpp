#include <tenure/train/parameters.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/shard/collectives.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <optional>
#include <utility>

namespace tenure::train {
namespace {

bool is_tied(const Stage& stage, const Layer::Weight& weight) {
  const auto& config = stage.config();
  return config.head == HeadKind::tied && weight.name == embedding_name(config.kind);
}

Parameters::Entry entry_of(const Stage& stage, const Layer::Weight& weight, at::Tensor value) {
  const auto tied = is_tied(stage, weight);
  return {weight.name, std::move(value), decay_of(weight.value), tied, tied && !stage.is_first()};
}

// The matrix that the first layer of the stage has, for its last one.
at::Tensor tied_inside(const Stage& stage) {
  if (stage.is_first() && stage.is_last()) {
    for (const auto& weight : stage.layers().front()->weights()) {
      if (is_tied(stage, weight)) {
        return weight.value;
      }
    }
  }
  return {};
}

std::vector<std::vector<std::vector<at::Tensor>>> weights_by_layer(const Stages& stages) {
  std::vector<std::vector<std::vector<at::Tensor>>> out;
  for (const auto& stage : stages) {
    auto& of_stage = out.emplace_back();
    for (const auto& layer : stage->layers()) {
      auto& of_layer = of_stage.emplace_back();
      for (const auto& weight : layer->weights()) {
        of_layer.push_back(weight.value);
      }
    }
    if (const auto tied = tied_inside(*stage); tied.defined()) {
      of_stage.back().push_back(tied);
    }
  }
  return out;
}

shard::Options sharding(std::chrono::milliseconds timeout) {
  shard::Options out;
  out.timeout = timeout;
  return out;
}

class WholeParameters final : public Parameters {
 public:
  WholeParameters(Stages stages, DataGroup data)
      : stages_(std::move(stages)), data_(std::move(data)) {
    for (const auto& stage : stages_) {
      for (const auto& layer : stage->layers()) {
        for (const auto& weight : layer->weights()) {
          entries_.push_back(entry_of(*stage, weight, weight.value));
        }
      }
    }
    weights_ = weights_by_layer(stages_);
  }

  at::Tensor run(size_t stage, size_t layer, const at::Tensor& x) override {
    return stages_[stage]->layers()[layer]->forward(x);
  }

  void begin() override {}

  void end() override {
    if (data_.group->getSize() == 1) {
      return;
    }
    std::vector<at::Tensor> bucket;
    uint64_t bytes = 0;
    for (const auto& entry : entries_) {
      if (!entry.value.grad().defined()) {
        continue;
      }
      bucket.push_back(entry.value.grad());
      bytes += bucket.back().nbytes();
      if (bytes >= kBucket) {
        average(std::exchange(bucket, {}));
        bytes = 0;
      }
    }
    average(bucket);
  }

  void give_up() noexcept override {}
  bool in_pieces() const override { return false; }

  void join(const std::vector<at::Tensor>& own, const Visit& visit) const override {
    for (size_t i = 0; i < own.size(); ++i) {
      visit(i, own[i]);
    }
  }
  at::Tensor own_part(size_t /*entry*/, const at::Tensor& whole) const override { return whole; }

 private:
  static constexpr uint64_t kBucket = 32 << 20;

  void average(const std::vector<at::Tensor>& gradients) const {
    if (gradients.empty()) {
      return;
    }
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> flat;
    for (const auto& gradient : gradients) {
      flat.push_back(gradient.reshape({-1}));
    }
    std::vector<at::Tensor> all{at::cat(flat)};
    shard::Pending([&] { return data_.group->allreduce(all); }).wait(data_.timeout, [&] {
      return text("adding up gradients over data-parallel ranks on rank ", data_.group->getRank());
    });
    all.front().div_(data_.group->getSize());
    int64_t at = 0;
    for (const auto& gradient : gradients) {
      gradient.copy_(all.front().narrow(0, at, gradient.numel()).view_as(gradient));
      at += gradient.numel();
    }
  }

  Stages stages_;
  DataGroup data_;
};

// A unit for each layer, and one for a tied matrix, so that its pieces are the same wherever it is.
class ShardedParameters final : public Parameters {
 public:
  ShardedParameters(Stages stages, const DataGroup& data, Gathered gathered)
      : stages_(std::move(stages)),
        model_(data.group, data.side, data.store, sharding(data.timeout)),
        gathered_(gathered) {
    weights_ = weights_by_layer(stages_);
    for (const auto& stage : stages_) {
      add(*stage);
    }
    const auto pieces = model_.pieces();
    if (pieces.size() != entries_.size()) {
      throw Error("a sharded model has other pieces than weights: this is a defect of Tenure");
    }
    for (size_t i = 0; i < pieces.size(); ++i) {
      entries_[i].value = pieces[i];
    }
  }

  at::Tensor run(size_t stage, size_t layer, const at::Tensor& x) override {
    std::vector<shard::InUse> uses;
    for (const auto& unit : units_[stage][layer]) {
      uses.push_back(unit.use());
    }
    auto out = stages_[stage]->layers()[layer]->forward(x);
    while (!uses.empty()) {
      uses.pop_back();  // innermost first
    }
    return out;
  }

  void begin() override {
    if (gathered_ == Gathered::whole_step) {
      held_.emplace(model_.hold());
    }
  }
  void end() override {
    if (held_) {
      held_->end();
      held_.reset();
    }
  }
  void give_up() noexcept override { held_.reset(); }
  bool in_pieces() const override { return true; }

  void join(const std::vector<at::Tensor>& own, const Visit& visit) const override {
    model_.join(own, visit);
  }
  at::Tensor own_part(size_t entry, const at::Tensor& whole) const override {
    return model_.piece_of(entry, whole);
  }

 private:
  void add(const Stage& stage) {
    auto& of_stage = units_.emplace_back();
    std::optional<shard::Unit> tied;
    for (size_t i = 0; i < stage.layers().size(); ++i) {
      auto& units = of_stage.emplace_back();
      shard::Model::Parameters own;
      for (const auto& weight : stage.layers()[i]->weights()) {
        if (is_tied(stage, weight)) {
          entries_.push_back(entry_of(stage, weight, {}));
          tied = model_.unit(weight.name, {{weight.name, weight.value}});
          units.push_back(*tied);
        } else {
          own.emplace_back(weight.name, weight.value);
        }
      }
      for (const auto& weight : stage.layers()[i]->weights()) {
        if (!is_tied(stage, weight)) {
          entries_.push_back(entry_of(stage, weight, {}));
        }
      }
      if (!own.empty()) {
        units.push_back(model_.unit(unit_name(own), own));
      }
    }
    if (tied && tied_inside(stage).defined()) {
      of_stage.back().push_back(*tied);
    }
  }

  // "transformer.h.3" of "transformer.h.3.ln_1.weight" and "transformer.h.3.mlp.c_fc.weight"; of
  // those that have nothing in common, "model.norm.weight" and "lm_head.weight", the first one's
  // module.
  static std::string unit_name(const shard::Model::Parameters& weights) {
    auto common = weights.front().first;
    for (const auto& [name, value] : weights) {
      common.resize(static_cast<size_t>(std::ranges::mismatch(common, name).in1 - common.begin()));
    }
    const auto& first = weights.front().first;
    const auto& of = common.find('.') == std::string::npos ? first : common;
    return of.substr(0, of.rfind('.'));
  }

  Stages stages_;
  shard::Model model_;
  Gathered gathered_;
  std::vector<std::vector<std::vector<shard::Unit>>> units_;  // by stage and layer
  std::optional<shard::Held> held_;
};

}  // namespace

std::vector<at::Tensor> Parameters::values() const {
  std::vector<at::Tensor> out;
  for (const auto& entry : entries_) {
    out.push_back(entry.value);
  }
  return out;
}

std::vector<at::Tensor> Parameters::weights() const {
  std::vector<at::Tensor> out;
  for (const auto& stage : weights_) {
    for (const auto& layer : stage) {
      out.insert(out.end(), layer.begin(), layer.end());
    }
  }
  return out;
}

std::unique_ptr<Parameters> whole_parameters(Stages stages, DataGroup data) {
  return std::make_unique<WholeParameters>(std::move(stages), std::move(data));
}

std::unique_ptr<Parameters> sharded_parameters(Stages stages, const DataGroup& data,
                                               Gathered gathered) {
  return std::make_unique<ShardedParameters>(std::move(stages), data, gathered);
}

}  // namespace tenure::train
