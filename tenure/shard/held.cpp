#include <tenure/core/error.h>
#include <tenure/core/torch_compat.h>
#include <tenure/shard/model_state.h>

#include <utility>

namespace tenure::shard {
namespace {

using Leaves = std::vector<std::vector<at::Tensor>>;

void drop_gradients(const Leaves& leaves) {
  for (const auto& flat : leaves) {
    for (const auto& leaf : flat) {
      leaf.mutable_grad().reset();
    }
  }
}

// Of one unit, so that no more than its gradients are there twice.
void add_up(Sharder& sharder, uint32_t unit, const Leaves& leaves) {
  for (uint32_t flat = 0; flat < leaves.size(); ++flat) {
    for (size_t i = 0; i < leaves[flat].size(); ++i) {
      if (const auto gradient = std::exchange(leaves[flat][i].mutable_grad(), {});
          gradient.defined()) {
        sharder.take(unit, flat, i, gradient);
      }
    }
  }
  sharder.add_up(unit);
}

}  // namespace

Held Model::hold() {
  const std::lock_guard lock(state_->mutex);
  if (state_->depth != 0 || compat::in_backward()) {
    throw InputError("a model cannot be held while one of its units is in use");
  }
  state_->require_pieces();
  state_->forget_backwards();
  state_->sharder->hold();
  state_->held = true;
  return Held(state_);
}

Held::Held(std::shared_ptr<Model::State> model) : model_(std::move(model)) {}
Held::Held(Held&& other) noexcept = default;

Held::~Held() {
  if (model_ == nullptr) {
    return;
  }
  const std::lock_guard lock(model_->mutex);
  model_->held = false;
  model_->sharder->drop_hold();
  for (const auto& unit : model_->living()) {
    drop_gradients(unit->leaves);
  }
}

void Held::end() {
  const auto model = std::exchange(model_, nullptr);
  if (model == nullptr) {
    return;
  }
  const std::lock_guard lock(model->mutex);
  model->held = false;
  const auto units = model->living();
  try {
    model->sharder->let_go();
    for (const auto& unit : units) {
      add_up(*model->sharder, unit->number, unit->leaves);
    }
    model->set_gradients(model->sharder->end_backward());
  } catch (...) {
    for (const auto& unit : units) {
      drop_gradients(unit->leaves);
    }
    model->sharder->drop_gradients();
    throw;
  }
}

}  // namespace tenure::shard
