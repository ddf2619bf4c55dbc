// How a session that may recompute finds out whether what it makes again is what it was.
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/offload/state.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace tenure::offload {
namespace {

// Steps in which all that is dropped is compared; what was not to be had then is kept.
constexpr uint32_t kMostProofs = 2;
// A forward that takes no less than this part of what was thought needs no other plan.
constexpr double kSameTime = 0.97;

// A number that is spread evenly over steps and places.
double spread(uint64_t step, uint64_t place) {
  auto mixed = (step * 0x9E3779B97F4A7C15U) ^ (place * 0xC2B2AE3D27D4EB4FU);
  mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93U;
  return static_cast<double>(mixed >> 11) / static_cast<double>(uint64_t{1} << 53);
}

}  // namespace

// All of what has not been proven yet, and a part of the rest where there is room for both. A plan
// that was only lifted keeps to the budget at once: it drops more of what was proven of others.
bool State::is_audited(const SavedStorage& entry) {
  const auto value = known_->followed->value_of_saved[entry.index];
  const auto& saved = known_->timeline.saved[entry.index];
  if (value == kNone || saved.needed == kNever) {
    return false;
  }
  const bool proven = known_->followed->proven[value];
  if (!proven && !known_->followed->keeps_budget) {
    proving_ = true;
    return true;
  }
  // Who wants all of it compared wants that more than the budget.
  const bool room = options.audit == 1 || of_cpu_ || saved.needed >= known_->plan.room.size() ||
                    known_->plan.room[saved.needed] >= static_cast<int64_t>(saved.bytes);
  return room && (!proven || spread(step_, entry.index) < options.audit);
}

// What an audited storage was.
c10::Storage State::brought_back(SavedStorage& entry, const c10::Stream& compute) {
  fetch(entry, Urgency::now);
  lane(entry.original.device()).copier.wait(entry.arrived, compute);
  auto out = entry.fetched.storage();
  entry.fetched.release();
  return out;
}

// On the CPU piece by piece, where it lies.
bool State::is_on_host(const SavedStorage& entry, const c10::Storage& made) {
  const auto* at = static_cast<const std::byte*>(made.data());
  bool same = true;
  entry.host.for_each_piece([&](const c10::Storage& piece, const HostPool::Busy&) {
    same = same && std::memcmp(at, piece.data(), piece.nbytes()) == 0;
    at += piece.nbytes();
  });
  return same;
}

// Compares what is made again with what it was, which may still be there. Waits for the device.
// Returns what was made as the plan has it, with no more memory than that: it need not be asked for
// any more.
std::optional<c10::Storage> State::audit(SavedStorage& entry,
                                         const std::optional<c10::Storage>& there, bool alone,
                                         const c10::Stream& compute) {
  auto& value = *entry.value;
  auto was = there;
  std::optional<c10::Storage> made;
  if (value.call != nullptr) {
    ++audited_;
    // Before the proof whatever goes wrong shows that it cannot be made again; after it that is an
    // error of its own, or nothing where it is still there.
    const auto failed = [&] {
      if (is_proven(entry) && !there) {
        throw;
      }
    };
    try {
      made = there ? lineage_.remake(value) : lineage_.ask(value, alone);
    } catch (const c10::Error&) {
      failed();
    } catch (const Error&) {
      failed();
    }
    const auto is_same = [&] {
      if (!was && entry.host && entry.original.device().is_cpu()) {
        return is_on_host(entry, *made);
      }
      was = was ? was : brought_back(entry, compute);
      return same_bytes(*was, *made);
    };
    if (made ? !is_same() : !is_proven(entry)) {
      was = was ? was : brought_back(entry, compute);
      made.reset();
      refuse(entry, *was);
    } else if (made && entry.step == step_ && known_ != nullptr && known_->followed != nullptr) {
      known_->followed->proven[value.index] = true;
    }
  }
  entry.host = HostCopy();
  entry.rest = nullptr;
  entry.was.release();
  return there ? std::nullopt : made;
}

bool State::is_proven(const SavedStorage& entry) const {
  return known_ == nullptr || known_->followed == nullptr || entry.step != step_ ||
         known_->followed->proven[entry.value->index];
}

// It is what it was for good, and nothing of its kind is made again.
void State::refuse(SavedStorage& entry, const c10::Storage& was) {
  auto& value = *entry.value;
  const bool proven = is_proven(entry);
  const auto name = call_text(value.call->op->name, value.call->module);
  denied_.insert({value.call->op->name, value.call->module});
  value.hold_for_good(was);
  if (proven) {
    forget_plans();
    throw MutationError(
        text(name,
             " gave something else when it was called again than it gave in forward: what it is "
             "made of was written to where PyTorch does not see it (numpy, a raw pointer, .data). ",
             "Gradients of this step may be wrong: leave it out. From now on what ", name,
             " makes is held"));
  }
}

// See Note [Timed in its place]. Whether another plan may be better now.
bool State::learn_call_times() {
  if (!call_times_.runs()) {
    return false;
  }
  auto& followed = *known_->followed;
  auto& calls = followed.script.trace.calls;
  double before = 0;
  double after = 0;
  for (const auto& [index, seconds] : call_times_.seconds()) {
    before += calls[index].seconds;
    calls[index].seconds = std::min(calls[index].seconds, seconds);
    after += calls[index].seconds;
  }
  followed.timed_in_place = true;
  followed.proofs = 0;
  return after < before * kSameTime;
}

// After a step that followed its plan to the end.
void State::finish_fit() {
  auto& followed = *known_->followed;
  const auto& calls = followed.script.trace.calls;
  bool refused = std::ranges::any_of(calls, [&](const CallTrace& call) {
    return call.repeatable && denied_.contains({call.op, call.module});
  });
  // What others held until it was needed could not be compared: it need not be made again either.
  if (proving_ && ++followed.proofs >= kMostProofs) {
    followed.proofs = 0;
    for (size_t i = 0; i < followed.saves; ++i) {
      const auto value = followed.value_of_saved[i];
      if (value != kNone && known_->plan.actions[i] == Action::recompute &&
          known_->timeline.saved[i].needed != kNever && !followed.proven[value]) {
        followed.script.trace.calls[followed.script.trace.values[value].call].repeatable = false;
        refused = true;
      }
    }
  }
  if (learn_call_times() || refused) {
    make_fit(*known_);
  }
}

}  // namespace tenure::offload
