// What a model of C++ does in its passes, and when a backward begins and ends.
#include <tenure/core/torch_compat.h>
#include <tenure/shard/model_state.h>

#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tenure::shard {
namespace {

int current_backward() { return torch::autograd::get_current_graph_task_id(); }

}  // namespace

void Model::State::begin() {
  const std::lock_guard lock(mutex);
  if (depth == 0 && !compat::in_backward()) {
    require_pieces();
    forget_backwards();
    sharder->begin_pass();
  }
  ++depth;
}

void Model::State::forget_backwards() {
  if (backwards.empty()) {
    return;
  }
  backwards.clear();
  for (const auto& unit : living()) {
    unit->open.clear();
    unit->came = 0;
  }
  sharder->drop_gradients();
}

void Model::State::give_up_failed() {
  std::vector<int> failed;
  for (const auto& [number, lives] : backwards) {
    if (lives.expired()) {
      failed.push_back(number);
    }
  }
  if (failed.empty()) {
    return;
  }
  for (const auto number : failed) {
    backwards.erase(number);
    for (const auto& unit : living()) {
      unit->close(number);
    }
  }
  if (!backwards.empty()) {
    return;  // what has come belongs to one that is around it, too
  }
  sharder->drop_gradients();
  if (depth == 0) {
    sharder->begin_pass();
  }
}

void Model::State::backward_runs(const std::shared_ptr<State>& self) {
  self->give_up_failed();
  const auto number = current_backward();
  if (self->backwards.contains(number)) {
    return;
  }
  auto lives = std::make_shared<const int>(number);
  self->backwards.emplace(number, lives);
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self, lives = std::move(lives)] { self->end_backward(*lives); });
}

void Model::State::end_backward(int number) {
  const std::lock_guard lock(mutex);
  const bool alone = backwards.size() == 1;
  backwards[number].reset();  // until it has ended without an exception
  for (const auto& unit : living()) {
    unit->close(number);
  }
  set_gradients(sharder->end_backward(alone ? Backward::outermost : Backward::inner));
  backwards.erase(number);
}

void Model::State::set_gradients(const std::vector<Reduced>& all) const {
  for (const auto& one : all) {
    const auto unit = units.at(one.unit).lock();
    if (unit == nullptr) {
      continue;
    }
    const auto& flat = unit->pieces.at(one.flat);
    for (size_t i = 0; i < flat.size(); ++i) {
      if (!one.came[i]) {
        continue;
      }
      const auto mean = one.mean.narrow(0, flat[i].storage_offset(), flat[i].numel());
      auto& gradient = flat[i].mutable_grad();
      gradient = gradient.defined() ? gradient + mean : mean;
    }
  }
}

void Unit::State::before(const std::shared_ptr<Call>& call) {
  const std::lock_guard lock(model->mutex);
  Model::State::backward_runs(model);
  if (call->backward != current_backward()) {
    model->sharder->require_values(number, call->values);
    call->backward = current_backward();
    call->done = 0;
    model->sharder->enter(number, Phase::backward);
    open.push_back(call);
  }
}

void Unit::State::after(const std::shared_ptr<Call>& call) {
  const std::lock_guard lock(model->mutex);
  if (++call->done < call->nodes) {
    return;
  }
  call->backward = -1;
  if (std::erase(open, call) != 0) {
    model->sharder->leave(number, Phase::backward);
  }
  finish();
}

void Unit::State::take(uint32_t flat, size_t index, const at::Tensor& gradient) {
  const std::lock_guard lock(model->mutex);
  Model::State::backward_runs(model);
  model->sharder->take(number, flat, index, gradient);
  ++came;
  finish();
}

void Unit::State::finish() {
  if (open.empty() && came >= expected) {
    came = 0;
    model->sharder->add_up(number);
  }
}

// A backward is over, whatever it has left out here.
void Unit::State::close(int backward) {
  came = 0;
  const auto over = std::ranges::stable_partition(
      open, [&](const std::shared_ptr<Call>& call) { return call->backward != backward; });
  const std::vector<std::shared_ptr<Call>> calls(over.begin(), over.end());
  open.erase(over.begin(), over.end());
  for (const auto& call : calls) {
    call->backward = -1;
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    model->sharder->leave(number, Phase::backward);
  }
}

}  // namespace tenure::shard
