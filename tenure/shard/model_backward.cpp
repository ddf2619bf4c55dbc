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
    unit->to_come.clear();
  }
  sharder->drop_gradients();
  sharder->give_up_pass();
}

void Model::State::give_up_failed() {
  std::vector<int> failed;
  for (const auto& [number, running] : backwards) {
    if (running.lives.expired()) {
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
    sharder->give_up_pass();
    sharder->begin_pass();
  }
}

const Course& Model::State::backward_runs(const std::shared_ptr<State>& self) {
  self->give_up_failed();
  const auto number = current_backward();
  if (const auto known = self->backwards.find(number); known != self->backwards.end()) {
    return known->second.course;
  }
  auto lives = std::make_shared<const int>(number);
  const auto& running = self->backwards.emplace(number, Running{Course(), lives}).first->second;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self, lives = std::move(lives)] { self->end_backward(*lives); });
  return running.course;
}

void Model::State::end_backward(int number) {
  const std::lock_guard lock(mutex);
  const bool alone = backwards.size() == 1;
  backwards.at(number).lives.reset();  // until it has ended without an exception
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
  const auto& course = Model::State::backward_runs(model);
  if (call->backward != current_backward()) {
    model->sharder->require_values(number, call->values);
    await_gradients(course);
    call->backward = current_backward();
    call->left = static_cast<size_t>(
        std::ranges::count_if(call->nodes, [&](const Known& node) { return course.runs(node); }));
    model->sharder->enter(number, Phase::backward);
    open.push_back(call);
  }
}

void Unit::State::after(const std::shared_ptr<Call>& call) {
  const std::lock_guard lock(model->mutex);
  if (call->left > 1) {
    --call->left;
    return;
  }
  if (std::exchange(call->left, 0) == 0) {
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
  await_gradients(Model::State::backward_runs(model));
  model->sharder->take(number, flat, index, gradient);
  if (auto& left = to_come.at(current_backward()); left != 0) {
    --left;
  }
  finish();
}

void Unit::State::await_gradients(const Course& course) {
  const auto [found, is_new] = to_come.try_emplace(current_backward());
  if (is_new) {
    for (const auto& flat : leaves) {
      found->second += course.gradients(flat);
    }
  }
}

void Unit::State::finish() {
  const auto all_came = [](const auto& one) { return one.second == 0; };
  if (open.empty() && std::ranges::all_of(to_come, all_came)) {
    model->sharder->add_up(number);
  }
}

// A backward is over, whatever it has left out here.
void Unit::State::close(int backward) {
  to_come.erase(backward);
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
