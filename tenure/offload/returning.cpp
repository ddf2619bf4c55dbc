// How what was saved comes back: when backward asks, or ahead of that.
#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/release.h>
#include <tenure/core/scope.h>
#include <tenure/core/streams.h>
#include <tenure/core/torch_compat.h>
#include <tenure/offload/state.h>

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace tenure::offload {

// Note [What backward is given]
// Autograd takes a gradient as its own, to keep as `.grad` or to add to in place, if nobody else
// refers to that tensor: a backward may return what it saved. So where the saved tensor is alive,
// it is given out itself, as PyTorch does. Else a view is, of memory that others may get, too:
//   - the saved storage, because something else of it is alive. The view has the saved tensor's
//     version counter, so that a write is found as PyTorch would.
//   - a storage that was fetched. Views of one share a counter, and once it has moved, who asks
//     next gets a fresh copy.
//   - where the graph is retained, a storage of its own: it may be asked for again when `.grad`
//     has been written to.
at::Tensor State::unpack(const Saved& saved, Sharing sharing) {
  saved.require_unchanged();
  if (saved.storage_ == nullptr) {
    const auto original = saved.original();
    return original.defined() ? original : saved.passed_;
  }
  auto& entry = *saved.storage_;
  std::lock_guard lock(mutex_);
  const auto compute = current_stream(entry.original.device());
  reach(entry);
  auto& lane = this->lane(entry.original.device());
  lane.outgoing.set_needed(&entry, true);
  keep_planned();
  limit_outgoing(lane);  // before memory is taken for this tick
  auto out = board(saved, compute, sharing);
  fetch_ahead(entry);
  return out;
}

// The step has come to the first need of this storage.
void State::reach(const SavedStorage& entry) {
  if (entry.step != step_ || !open_) {
    return;
  }
  recorder_.needed(entry.index);
  if (mode_ == Mode::measuring && options.recompute) {
    follow_ticks();
  }
  lineage_.let_go();
  doubt(entry);
  if (mode_ == Mode::planned) {
    const auto needed = known_->timeline.saved[entry.index].needed;
    if (needed != kNever) {
      position_ = std::max(position_, needed);
    } else if (options.recompute) {
      lineage_.lose("backward goes where it did not in the profiled step");
      mode_ = Mode::following;
    }
  }
}

// A plan said that others hold it until now. They do if there are more references than ours: the
// lease, the one in this function, and one of each tensor that autograd was given.
void State::doubt(const SavedStorage& entry) {
  if (!entry.lives_on || mode_ != Mode::planned || entry.uses > 0 || !entry.kept.held()) {
    return;
  }
  const auto storage = entry.kept.storage();
  if (storage.use_count() <= entry.views + 2) {
    alone_ += storage.nbytes();
  }
}

// The saved tensor on the device.
at::Tensor State::board(const Saved& saved, const c10::Stream& compute, Sharing sharing) {
  auto& entry = *saved.storage_;
  auto original = saved.original();
  if (original.defined() &&
      (StorageRef(original.storage()) != entry.original || is_released(original.storage()))) {
    original.reset();
  }
  const bool first = entry.uses++ == 0;
  if (entry.action == Action::recompute && !original.defined()) {
    return remade(saved, compute, sharing);
  }
  if (entry.action == Action::recompute) {
    return original;
  }
  if (entry.action == Action::keep) {
    return original.defined() ? original : saved.passed_;
  }
  if (first && entry.fetched.held()) {
    ahead_ -= std::min<uint64_t>(ahead_, entry.bytes);
  }
  lane(entry.original.device()).outgoing.set_needed(&entry, false);
  const bool retained = compat::backward_retains_graph();
  if (auto there = entry.original.lock();
      there && !is_released(*there) && (original.defined() || !retained)) {
    ++now_.reused.count;
    now_.reused.bytes += entry.bytes;
    stay_or_go(entry, *there);
    return original.defined() ? original
                              : saved.view_of(std::move(*there), 0, saved.version_.counter());
  }
  const auto storage = fetched(entry, compute, retained ? Sharing::own : sharing);
  return saved.view_of(storage, entry.begin, entry.board);
}

c10::Storage State::fetched(SavedStorage& entry, const c10::Stream& compute, Sharing sharing) {
  const bool untouched = entry.board.enabled() && entry.board.current_version() == 0;
  std::optional<c10::Storage> there;
  if (untouched && entry.fetched.held() && StorageRef(entry.fetched.storage()) != entry.original) {
    there = entry.fetched.storage();
  } else if (sharing == Sharing::shared && untouched) {
    there = entry.on_board.lock();
  }
  if (!there) {
    fetch(entry, Urgency::now);
    there = entry.fetched.storage();
  }
  lane(there->device()).copier.wait(entry.arrived, compute);
  if (compute != entry.compute) {
    used_on(*there, compute);
  }
  if (sharing == Sharing::own) {
    entry.on_board = StorageRef();
    entry.fetched.release();
  } else {
    entry.on_board = StorageRef(*there);
    stay_or_go(entry, *there);
  }
  return std::move(*there);
}

// Handed out: from here on it lives as long as backward uses it, or until its last use.
void State::stay_or_go(SavedStorage& entry, const c10::Storage& storage) {
  if (!stays(entry)) {
    entry.fetched.release();
  } else if (!entry.fetched.held()) {
    entry.fetched = hold(storage, entry.on_device, ScopeId::process);
  }
}

bool State::stays(const SavedStorage& entry) const {
  if (entry.step != step_ || !open_ || mode_ == Mode::measuring) {
    return false;
  }
  if (entry.asks > 0) {
    return true;
  }
  if (mode_ == Mode::planned) {
    const bool whole = entry_at(entry.index).get() == &entry;  // not another part of it
    return whole && known_->plan.stays[entry.index] &&
           entry.uses < known_->timeline.saved[entry.index].uses;
  }
  // Until the graph lets go of it.
  return !options.budget && !compat::backward_retains_graph();
}

// Queues the copy back, into memory of the stream that computes.
void State::fetch(SavedStorage& entry, Urgency urgency) {
  auto& lane = this->lane(entry.original.device());
  const c10::OptionalStreamGuard guard(lane.device.is_cpu() ? std::nullopt
                                                            : std::optional(entry.compute));
  const c10::Storage storage(c10::Storage::use_byte_size_t(),
                             c10::SymInt(static_cast<int64_t>(entry.bytes)),
                             c10::GetAllocator(lane.device.type()), true);
  entry.fetched = hold(storage, entry.on_device, ScopeId::process);
  entry.board = c10::VariableVersion(0);
  const auto copy_back = [&](HostCopy& from) {
    entry.arrived = lane.copier.back(from, storage, entry.compute, entry.left, urgency);
  };
  if (entry.rest != nullptr) {
    const auto room = [&] { return room_for(entry, HostPool::Limit::exceeded); };
    disk_->with_bytes(entry.rest, room, copy_back);
  } else {
    copy_back(entry.host);
  }
  ++now_.moved_in.count;
}

void State::fetch_ahead(const SavedStorage& entry) {
  if (entry.step != step_ || !open_ || mode_ == Mode::measuring) {
    return;
  }
  if (mode_ == Mode::planned) {
    fetch_planned();
  } else {
    fetch_in_reverse(entry);
  }
}

// What is to be fetched now and has not left yet need not go.
void State::keep_planned() {
  if (mode_ != Mode::planned || !open_) {
    return;
  }
  const auto& fetch_at = known_->plan.fetch;
  for (auto tick = fetched_upto_; tick <= position_ && tick < fetch_at.size(); ++tick) {
    for (const auto index : fetch_at[tick]) {
      const auto entry = entry_at(index);
      const auto original = entry != nullptr ? entry->original.lock() : std::nullopt;
      if (original && entry->action == Action::offload && !entry->fetched.held()) {
        stay(*entry, *original);
      }
    }
  }
}

void State::fetch_planned() {
  const auto& fetch_at = known_->plan.fetch;
  for (; fetched_upto_ <= position_ && fetched_upto_ < fetch_at.size(); ++fetched_upto_) {
    for (const auto index : fetch_at[fetched_upto_]) {
      if (!try_fetch(index)) {
        return;
      }
    }
  }
}

// As if backward were forward's mirror image.
void State::fetch_in_reverse(const SavedStorage& entry) {
  const auto room = following_room();
  for (size_t i = std::min(entry.index, order_.size()); i-- > 0 && ahead_ < room;) {
    if (!try_fetch(i)) {
      return;
    }
  }
}

// It has not left yet, and will be needed soon.
void State::stay(SavedStorage& entry, const c10::Storage& storage) {
  if (lane(storage.device()).outgoing.set_needed(&entry, true)) {
    entry.fetched = hold(storage, entry.on_device, ScopeId::process);
  }
}

// False where the device has no room for it now.
bool State::try_fetch(size_t index) {
  const auto entry = entry_at(index);
  if (entry == nullptr || entry->action != Action::offload || entry->uses > 0 ||
      entry->fetched.held()) {
    return true;
  }
  try {
    if (const auto original = entry->original.lock()) {
      stay(*entry, *original);
    } else if (entry->rest != nullptr) {
      disk_->read_ahead(entry->rest, [&] { return room_for(*entry); });
      return true;  // to the device when it is asked for: only then is it in memory for sure
    } else {
      fetch(*entry, Urgency::ahead);
    }
  } catch (const c10::OutOfMemoryError&) {
    return false;  // it is fetched when it is asked for, and an error then is the user's
  } catch (const BudgetError&) {
    return false;  // no room on the host to read it ahead
  }
  ahead_ += entry->bytes;
  return true;
}

}  // namespace tenure::offload
