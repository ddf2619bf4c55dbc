#include <tenure/shard/model.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/shard/model_state.h>
#include <tenure/shard/ops.h>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <iostream>
#include <map>
#include <mutex>
#include <set>

namespace tenure::shard {

bool Unit::State::has(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.has_storage() &&
         std::ranges::find(storages, tensor.storage().unsafeGetStorageImpl()) != storages.end();
}

Model::State::State(std::shared_ptr<Sharder> made, c10::intrusive_ptr<c10d::ProcessGroup> ranks,
                    std::chrono::milliseconds patience)
    : sharder(std::move(made)), group(std::move(ranks)), timeout(patience) {}
Model::State::~State() = default;

std::vector<std::shared_ptr<Unit::State>> Model::State::living() const {
  std::vector<std::shared_ptr<Unit::State>> out;
  for (const auto& unit : units) {
    if (auto one = unit.lock()) {
      out.push_back(std::move(one));
    }
  }
  return out;
}

namespace {

using torch::autograd::variable_list;

// Hooks hold the state of a unit, which holds no graph.
template <class State>
class Before final : public torch::autograd::FunctionPreHook {
 public:
  Before(std::shared_ptr<State> unit, std::shared_ptr<Call> call)
      : unit_(std::move(unit)), call_(std::move(call)) {}
  variable_list operator()(const variable_list& gradients) override {
    unit_->before(call_);
    return gradients;
  }

 private:
  std::shared_ptr<State> unit_;
  std::shared_ptr<Call> call_;
};

template <class State>
class After final : public torch::autograd::FunctionPostHook {
 public:
  After(std::shared_ptr<State> unit, std::shared_ptr<Call> call)
      : unit_(std::move(unit)), call_(std::move(call)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    unit_->after(call_);
    return outputs;
  }

 private:
  std::shared_ptr<State> unit_;
  std::shared_ptr<Call> call_;
};

template <class State>
class Taker final : public torch::autograd::PostAccumulateGradHook {
 public:
  Taker(const std::shared_ptr<State>& unit, uint32_t flat, size_t index)
      : unit_(unit), flat_(flat), index_(index) {}
  void operator()(const at::Tensor& parameter) override {
    const auto unit = unit_.lock();
    if (unit != nullptr && unit->model->held) {
      return;  // added up there, as in any parameter, until the hold ends
    }
    const auto gradient = std::exchange(parameter.mutable_grad(), {});
    if (gradient.defined() && unit != nullptr) {
      unit->take(flat_, index_, gradient);
    }
  }

 private:
  std::weak_ptr<State> unit_;  // the parameter may outlive it
  uint32_t flat_;
  size_t index_;
};

// The uses that this thread is in, innermost last.
struct Watched {
  std::function<bool(const at::Tensor&)> has;
  std::function<void(const at::Tensor&)> made;
};
std::vector<Watched>& watched() {
  thread_local std::vector<Watched> here;
  return here;
}

template <class Values, class Visit>
void each_tensor(const Values& values, const Visit& visit) {
  for (const auto& value : values) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        visit(tensor);
      }
    }
  }
}

// An operator that runs, with the uses whose parameters it was given: its inputs are there only
// when it begins, its outputs only when it ends.
struct Running : at::ObserverContext {
  std::vector<size_t> uses;
};

std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction& function) {
  std::unique_ptr<Running> out;
  for (size_t i = 0; i < watched().size(); ++i) {
    bool reads = false;
    each_tensor(function.inputs(),
                [&](const at::Tensor& tensor) { reads = reads || watched()[i].has(tensor); });
    if (reads) {
      out = out ? std::move(out) : std::make_unique<Running>();
      out->uses.push_back(i);
    }
  }
  return out;
}

void operator_ends(const at::RecordFunction& function, at::ObserverContext* context) {
  if (const auto* running = static_cast<Running*>(context)) {
    for (const auto use : running->uses) {
      each_tensor(function.outputs(), watched().at(use).made);
    }
  }
}

}  // namespace

struct InUse::State {
  std::shared_ptr<Unit::State> unit;
  bool watches = false;  // operators
  at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
};

InUse::InUse(std::unique_ptr<State> state) : state_(std::move(state)) {}
InUse::InUse(InUse&& other) noexcept = default;

InUse::~InUse() {
  if (state_ == nullptr) {
    return;
  }
  if (state_->callback != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(state_->callback);
  }
  if (state_->watches) {
    watched().pop_back();
  }
  auto& model = *state_->unit->model;
  const std::lock_guard lock(model.mutex);
  --model.depth;
  try {
    model.sharder->leave(state_->unit->number, Phase::forward);
  } catch (const Error& error) {  // a parameter was written to
    std::cerr << "tenure: " << error.what() << '\n';
  }
}

InUse Unit::use() const {
  auto& model = *state_->model;
  if (model.held) {
    return InUse(nullptr);
  }
  model.begin();
  auto state = std::make_unique<InUse::State>();
  state->unit = state_;
  uint64_t values = 0;
  {
    const std::lock_guard lock(model.mutex);
    try {
      values = model.sharder->enter(state_->number, Phase::forward);
    } catch (...) {
      --model.depth;
      throw;
    }
  }
  if (at::GradMode::is_enabled()) {
    auto call = std::make_shared<Call>();
    call->values = values;
    auto seen = std::make_shared<std::set<const void*>>();
    watched().push_back(
        {[unit = state_.get()](const at::Tensor& tensor) { return unit->has(tensor); },
         [unit = state_, call, seen](const at::Tensor& tensor) {
           const auto& node = tensor.grad_fn();
           if (node && seen->insert(node.get()).second) {
             call->nodes.emplace_back(*node);
             node->add_pre_hook(std::make_unique<Before<State>>(unit, call));
             node->add_post_hook(std::make_unique<After<State>>(unit, call));
           }
         }});
    state->watches = true;
    if (watched().size() == 1) {  // one is enough for all
      state->callback =
          at::addThreadLocalCallback(at::RecordFunctionCallback(&operator_begins, &operator_ends)
                                         .needsInputs(true)
                                         .needsOutputs(true)
                                         .scopes({at::RecordScope::FUNCTION}));
    }
  }
  return InUse(std::move(state));
}

Model::Model(c10::intrusive_ptr<c10d::ProcessGroup> group,
             c10::intrusive_ptr<c10d::ProcessGroup> side, c10::intrusive_ptr<c10d::Store> store,
             Options options) {
  auto sharder = std::make_shared<Sharder>(
      Collectives(group), Agreement(std::move(side), std::move(store), options.timeout), options);
  number_model(sharder);
  state_ = std::make_shared<State>(std::move(sharder), std::move(group), options.timeout);
}
Model::~Model() = default;

Unit Model::unit(const std::string& name, const Parameters& parameters) {
  // One flat for each dtype, and apart for those without gradients.
  std::map<std::pair<c10::ScalarType, bool>, std::vector<size_t>> alike;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [parameter, tensor] = parameters[i];
    if (!tensor.is_leaf() || tensor.device() != parameters.front().second.device()) {
      throw InputError(text("parameter '", parameter, "' of unit '", name,
                            tensor.is_leaf() ? "' is on another device than the others"
                                             : "' is the result of an operator, not a leaf"));
    }
    alike[{tensor.scalar_type(), tensor.requires_grad()}].push_back(i);
  }
  std::vector<std::vector<std::string>> names;
  std::vector<std::vector<at::Tensor>> values;
  std::vector<std::vector<at::Tensor>> leaves;
  for (const auto& [kind, members] : alike) {
    names.emplace_back();
    values.emplace_back();
    leaves.emplace_back();
    for (const auto i : members) {
      names.back().push_back(parameters[i].first);
      values.back().push_back(parameters[i].second.detach());
      leaves.back().push_back(parameters[i].second);
    }
  }
  auto unit = std::make_shared<Unit::State>();
  unit->model = state_;
  unit->number = state_->sharder->add(name, names, values);
  for (uint32_t flat = 0; flat < leaves.size(); ++flat) {
    auto& of = state_->sharder->flat(unit->number, flat);
    of.hand_to(leaves[flat]);
    unit->storages.push_back(leaves[flat].front().storage().unsafeGetStorageImpl());
    unit->leaves.push_back(leaves[flat]);
    unit->pieces.emplace_back();
    for (size_t i = 0; i < leaves[flat].size(); ++i) {
      const auto& leaf = leaves[flat][i];
      auto piece = of.piece_of(i);
      if (leaf.requires_grad()) {
        piece.requires_grad_();
        torch::autograd::impl::set_post_acc_grad_hooks(
            leaf, std::make_unique<Taker<Unit::State>>(unit, flat, i));
      }
      unit->pieces.back().push_back(piece);
      state_->pieces.push_back(piece);
      state_->places.push_back({unit->number, flat, i});
    }
  }
  state_->units.push_back(unit);
  return Unit(std::move(unit));
}

Stats Model::stats() const { return state_->sharder->stats(); }

}  // namespace tenure::shard
