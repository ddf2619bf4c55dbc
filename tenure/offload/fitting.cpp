// How a session that may recompute follows its plan: drops, makes again, and tells.
#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/release.h>
#include <tenure/core/streams.h>
#include <tenure/core/text.h>
#include <tenure/core/torch_compat.h>
#include <tenure/core/where.h>
#include <tenure/offload/active.h>
#include <tenure/offload/state.h>

#include <c10/util/hash.h>

#include <algorithm>
#include <map>
#include <tuple>

namespace tenure::offload {
namespace {

// The tensors that a call is about to write to; of what a class of Python's wraps, those inside.
c10::SmallVector<at::Tensor, 2> written_by(const Operator& op, const torch::jit::Stack& stack) {
  c10::SmallVector<at::Tensor, 2> out;
  const auto* arguments = stack.data() + stack.size() - op.arguments;
  if (op.writes_if && !arguments[*op.writes_if].toBool()) {
    return out;
  }
  const auto add = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return;
    }
    if (tensor.key_set().has(c10::DispatchKey::Python)) {
      const auto inside = wrapped_in(tensor);
      out.append(inside.begin(), inside.end());
    } else {
      out.push_back(tensor);
    }
  };
  for (const auto place : op.writes) {
    const auto& argument = arguments[place];
    if (argument.isTensor()) {
      add(argument.toTensor());
    } else if (argument.isTensorList()) {
      std::ranges::for_each(argument.toTensorVector(), add);
    }
  }
  return out;
}

}  // namespace

// The plan of the mode that was chosen, or none.
void State::follow() {
  const auto followed = mode_ == Mode::planned ? known_->followed : nullptr;
  const bool times = followed != nullptr && meter_ != nullptr && !followed->timed_in_place;
  call_times_.begin(times ? meter_->device() : c10::Device(c10::DeviceType::CPU));
  lineage_.begin(followed, calls_before_);
  roots_.assign(followed != nullptr ? followed->fit.roots.size() : 0, {});
}

void State::call(const Operator& op, Invocation& invocation) {
  if (!op.writes.empty()) {
    tell_writes(op, invocation.arguments());
  }
  if (compat::in_backward()) {
    invocation.run();
    return;
  }
  if (!opened_) {
    open(op, invocation.arguments());
  }
  if (mode_ == Mode::measuring) {
    call_profiled(op, invocation);
  } else {
    call_followed(op, invocation);
  }
}

// Note [What a step begins with]
// Before its first call a step is taken for the one that the rhythm says. Where lengths come at
// random there is none; but what a step works on is mostly among the arguments of the first call
// that has any. While nothing was saved the plan may still be another: one that began so.
void State::open(const Operator& op, const torch::jit::Stack& stack) {
  std::lock_guard lock(mutex_);
  opened_ = !order_.empty();
  if (opened_) {
    return;
  }
  const auto sizes = sizes_of_call(op, stack);
  if (!sizes) {
    ++calls_before_;
    return;
  }
  opened_ = true;
  opening_ = c10::hash_combine(*sizes, calls_before_);
  if (choose_by(opening_)) {
    follow();
  }
}

void State::tell_writes(const Operator& op, const torch::jit::Stack& stack) {
  const auto tensors = written_by(op, stack);
  std::lock_guard lock(mutex_);
  for (const auto& tensor : tensors) {
    if (!is_plain(tensor)) {
      continue;
    }
    if (mode_ == Mode::measuring) {
      profile_.written(tensor, recorder_.interval());
    }
    if (lineage_.written(tensor)) {
      keep_dropped(tensor.storage());
    }
  }
}

// What autograd saves it shares with whoever writes to it. Where that is an error the version tells
// in backward; where it is none, as through `.data`, backward is to see what was written.
void State::keep_dropped(const c10::Storage& storage) {
  const auto known = table_.find(StorageRef(storage));
  if (known == table_.end()) {
    return;
  }
  for (const auto& weak : known->second) {
    const auto entry = weak.lock();
    if (entry != nullptr && entry->value != nullptr) {
      entry->kept = hold(storage, entry->on_device, ScopeId::process);
      entry->value = nullptr;
    }
  }
}

void State::call_followed(const Operator& op, Invocation& invocation) {
  std::shared_ptr<Call> call;
  bool passes = false;
  {
    std::lock_guard lock(mutex_);
    if (call_times_.runs()) {
      call_times_.called(lineage_.next());
    } else {
      passes = op.writes.empty() && lineage_.passes(op);
    }
    if (!passes) {
      call = lineage_.before(op, invocation.arguments());
      if (mode_ == Mode::planned && !lineage_.lost().empty()) {
        mode_ = Mode::following;
      }
    }
  }
  invocation.run();
  if (passes) {
    return;
  }
  const auto& outputs = invocation.outputs();
  std::lock_guard lock(mutex_);
  if (call_times_.runs()) {
    call_times_.made(op, outputs);
  }
  lineage_.after(op, call, outputs);
  if (mode_ == Mode::planned && !lineage_.lost().empty()) {
    mode_ = Mode::following;
  }
}

State::Entry State::entry_at(size_t index) const {
  if (index < order_.size()) {
    return order_[index].lock();
  }
  const auto saves =
      known_ != nullptr && known_->followed != nullptr ? known_->followed->saves : order_.size();
  return index >= saves && index - saves < roots_.size() ? roots_[index - saves].lock() : nullptr;
}

bool State::is_dropped(const SavedStorage& entry) const {
  return mode_ == Mode::planned && options.recompute &&
         known_->plan.actions[entry.index] == Action::recompute;
}

// Until the call that makes it is over it is held: only then is there a recipe.
void State::drop(const Entry& entry, const c10::Storage& storage) {
  entry->action = Action::recompute;
  if (!lineage_.drop(entry, entry->index)) {
    entry->kept = hold(storage, entry->on_device, ScopeId::process);
  }
  if (is_audited(*entry)) {
    if (proving_ && keeps_profiled(storage)) {
      entry->was = hold(storage, entry->on_device, ScopeId::process);
    } else {
      move_out(*entry, storage);
      entry->action = Action::recompute;
    }
  }
  ++now_.dropped.count;
  now_.dropped.bytes += storage.nbytes();
}

std::shared_ptr<SavedStorage> State::save_root(const at::Tensor& tensor, size_t place) {
  const auto& storage = tensor.storage();
  auto& lane = this->lane(storage.device());
  auto entry = std::make_shared<SavedStorage>(storage, current_stream(lane.device));
  entry->version = Version(tensor);
  entry->bytes = storage.nbytes();
  entry->step = step_;
  entry->root = true;
  entry->index = place;
  if (!name_owners(*entry)) {
    const auto& followed = *known_->followed;
    entry->on_device = followed.owners[followed.value_of_saved[place]];
  }
  roots_[place - known_->followed->saves] = entry;
  const auto& plan = known_->plan;
  if (plan.actions[place] == Action::offload && storage.device().is_cpu() == of_cpu_) {
    move_out(*entry, storage);
  } else {
    entry->action = Action::keep;
    entry->kept = hold(storage, entry->on_device, ScopeId::process);
    if (plan.why[place] != Kept::lives_on) {
      count(plan.why[place], storage.nbytes());
    }
  }
  return entry;
}

c10::Storage State::content(SavedStorage& entry, const c10::Stream& compute) {
  if (entry.action == Action::keep && entry.kept.held()) {
    return entry.kept.storage();
  }
  if (auto there = entry.original.lock(); there && !is_released(*there)) {
    stay_or_go(entry, *there);
    return std::move(*there);
  }
  if (entry.action == Action::keep) {
    forget_plans();
    throw UseAfterRelease(
        text("saved activations are asked for more often than in the step that was profiled, and ",
             entry.original.text(),
             ", of which they are made again, has been let go after its last use then. Look at "
             "saved tensors in the profiled step, too, or outside of Fit"));
  }
  return fetched(entry, compute, Sharing::shared);
}

// The plan has it no longer on the device. Its host copy stays until nobody is made of it; one that
// has still not left counts from here on among what leaves, for which the next tick waits.
void State::used_up(SavedStorage& root) {
  root.fetched.release();
  root.kept.release();
  lane(root.original.device()).outgoing.set_needed(&root, false);
}

// What was dropped, made again.
at::Tensor State::remade(const Saved& saved, const c10::Stream& compute, Sharing sharing) {
  auto& entry = *saved.storage_;
  if (entry.value == nullptr) {
    return saved.view_of(entry.kept.storage(), 0, saved.version_.counter());
  }
  const bool alone = sharing == Sharing::own || compat::backward_retains_graph();
  auto there = entry.original.lock();
  if (there && is_released(*there)) {
    there.reset();
  }
  std::optional<c10::Storage> made;
  if (entry.host || entry.rest != nullptr || entry.was.held()) {
    made = audit(entry, there, alone, compute);
  }
  if (there && !alone) {
    (void)lineage_.ask(*entry.value, false);
    return saved.view_of(std::move(*there), 0, saved.version_.counter());
  }
  auto storage = made ? std::move(*made) : lineage_.ask(*entry.value, alone);
  const auto board =
      alone || !entry.value->board.enabled() ? c10::VariableVersion(0) : entry.value->board;
  return saved.view_of(std::move(storage), 0, board);
}

Bus State::bus() const {
  const auto moved = totals();
  if (!options.moves) {
    return {};
  }
  return {.out = moved.out.bandwidth(), .back = moved.back.bandwidth(), .small = 0};
}

int64_t State::least_of(const Known& known) const {
  return known.followed != nullptr ? known.followed->fit.least : least_peak(known.timeline);
}

Fitted State::fitted() {
  std::lock_guard lock(mutex_);
  Fitted out;
  for (const auto& [op, module] : denied_) {
    out.denied.push_back(call_text(op, module));
  }
  out.saves_nothing = saves_nothing_;
  out.least = refused_ ? last_.least : 0;
  if (all_known_.empty() || all_known_.front()->followed == nullptr) {
    return out;
  }
  const auto& known = *all_known_.front();
  const auto& trace = known.followed->script.trace;
  std::map<std::tuple<Action, NameId, NameId>, Fitted::Row> rows;
  for (size_t i = 0; i < known.plan.actions.size(); ++i) {
    const auto value = known.followed->value_of_saved[i];
    if (known.plan.actions[i] == Action::keep && known.plan.why[i] == Kept::lives_on) {
      continue;
    }
    const auto* call = value == kNone || trace.values[value].call == kNone
                           ? nullptr
                           : &trace.calls[trace.values[value].call];
    const auto op = call != nullptr ? call->op : NameId::none;
    const auto module = call != nullptr ? call->module : NameId::none;
    auto& row = rows[{known.plan.actions[i], module, op}];
    row.module = module;
    row.op = op;
    row.action = known.plan.actions[i];
    ++row.count;
    row.bytes += known.timeline.saved[i].bytes;
    row.seconds += row.action == Action::recompute && call != nullptr ? call->seconds : 0;
  }
  for (const auto& [key, row] : rows) {
    out.rows.push_back(row);
  }
  std::ranges::sort(out.rows, [](const Fitted::Row& a, const Fitted::Row& b) {
    return std::tuple(a.action, b.bytes) < std::tuple(b.action, a.bytes);
  });
  out.promised = known.plan.peak;
  out.least = last_.least;
  out.recompute_seconds = known.followed->fit.recompute_seconds;
  out.exposed_seconds = known.followed->fit.exposed_seconds;
  return out;
}

std::vector<Point> State::frontier(size_t points) {
  std::shared_ptr<Known> known;
  Bus way;
  {
    std::lock_guard lock(mutex_);
    if (all_known_.empty() || all_known_.front()->followed == nullptr) {
      return {};
    }
    known = all_known_.front();
    way = bus();
    way.small = known->small;
  }
  return offload::frontier(known->measured, known->followed->script.trace, way, points);
}

}  // namespace tenure::offload
