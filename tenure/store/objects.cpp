#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/text.h>
#include <tenure/store/errors.h>
#include <tenure/store/objects_state.h>

#include <chrono>
#include <utility>

namespace tenure::store {
namespace {

// fork_generation() counts from the first registration on.
uint32_t counted_generation() {
  static const bool counted = [] {
    on_fork_in_child([] {});
    return true;
  }();
  static_cast<void>(counted);
  return fork_generation();
}

Limits checked(Limits limits) {
  if (limits.lease_ms <= 0) {
    throw InputError(text("a lease of ", limits.lease_ms, " ms: it must last longer than that"));
  }
  if (limits.small_bytes > kMostSlabBytes) {
    throw InputError(text("small objects of up to ", bytes_text(limits.small_bytes),
                          ": the most is ", bytes_text(kMostSlabBytes)));
  }
  return limits;
}

}  // namespace

Objects::State::State(Member member, Limits given)
    : self(std::move(member)),
      limits(checked(std::move(given))),
      generation(counted_generation()),
      room(Room::make(this->limits.cap)),
      slabs(Slabs::make(room)),
      disk(this->limits.when_full == WhenFull::spill
               ? std::make_unique<Spill>(this->limits.spill_folder, this->limits.small_bytes)
               : nullptr) {
  check_member(this->self);
}

void Objects::State::check_process() const {
  if (fork_generation() != generation) {
    throw Error(text("the store of ", member_text(self),
                     " was made before this process was forked and belongs to its parent: make "
                     "one of your own"));
  }
}

int64_t Objects::State::clock() const {
  if (limits.clock) {
    return limits.clock();
  }
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool Objects::State::was_given_out(ObjectId id) const {
  return id.slot < slots.end() && id.generation != 0 &&
         id.generation <= slots.at(id.slot).generation;
}

void Objects::State::free_slot(uint32_t index, const Member& by, Freed reason, int64_t at_ms,
                               Dead& dead) {
  auto& slot = slots.at(index);
  auto& line = ledger.at(slot.line);
  (slot.before == kNoSlot ? line.first : slots.at(slot.before).next) = slot.next;
  if (slot.next != kNoSlot) {
    slots.at(slot.next).before = slot.before;
  }
  const auto why = static_cast<size_t>(reason);
  ++line.tally.freed[why];
  line.tally.freed_bytes[why] += slot.content->bytes();

  if (slot.shared != 0) {
    auto& sharing = sharers.at(slot.content.get());
    sharing.erase(index);
    if (sharing.empty()) {
      sharers.erase(slot.content.get());
    }
  }
  const bool is_early =
      reason == Freed::asked || reason == Freed::replaced || reason == Freed::failed;
  if (is_early && !consumers.all().empty()) {
    withdrawn.push_back({index, slot.generation});
  }
  dead.push_back(std::move(slot.content));
  slot.content = nullptr;
  claims.drop(slot.claim, slot.pending);
  slot.by = members.take(by);
  slot.at_ms = at_ms;
  slot.reason = reason;
  slots.give_back(index);
  --counts.objects;
}

void Objects::State::free_lines(const std::vector<uint32_t>& lines, const Member& by, Freed reason,
                                Dead& dead) {
  const auto at_ms = now_ms();
  for (const auto line : lines) {
    while (ledger.at(line).first != kNoSlot) {
      free_slot(ledger.at(line).first, by, reason, at_ms, dead);
    }
  }
}

std::string_view freed_name(Freed reason) {
  switch (reason) {
    case Freed::fetched:
      return "fetched";
    case Freed::closed:
      return "closed";
    case Freed::replaced:
      return "replaced";
    case Freed::failed:
      return "failed";
    case Freed::asked:
      return "asked";
    case Freed::expired:
      return "expired";
  }
  return "unknown";
}

Objects::Objects(Member self, Limits limits)
    : state_(std::make_unique<State>(std::move(self), std::move(limits))) {}

Objects::~Objects() {
  if (fork_generation() != state_->generation) {
    // NOLINTNEXTLINE(bugprone-unused-return-value): the parent's, and left alone
    state_.release();
  }
}

uint32_t Objects::begin_call(const ScopeName& scope, const std::string& call) {
  state_->check_process();
  Dead dead;
  std::lock_guard lock(state_->mutex);
  if (!state_->ledger.closed(scope)) {
    state_->free_lines(state_->ledger.lines_of(scope, call), state_->self, Freed::replaced, dead);
    state_->ledger.next_attempt(scope, call);
  }
  return state_->ledger.attempt(scope, call);
}

void Objects::fail_call(const ScopeName& scope, const std::string& call,
                        std::optional<uint32_t> attempt) {
  state_->check_process();
  Dead dead;
  std::lock_guard lock(state_->mutex);
  const auto latest = state_->ledger.attempt(scope, call);
  if (!state_->ledger.closed(scope) && attempt.value_or(latest) == latest) {
    state_->free_lines(state_->ledger.lines_of(scope, call), state_->self, Freed::failed, dead);
    state_->ledger.next_attempt(scope, call);
  }
}

Account Objects::close(const ScopeName& scope, const Member& by) {
  state_->check_process();
  check_scope(scope);
  Dead dead;
  std::lock_guard lock(state_->mutex);
  if (state_->ledger.closed(scope)) {
    return state_->account(scope);
  }
  state_->free_lines(state_->ledger.lines_of(scope), by, Freed::closed, dead);
  auto books = state_->account(scope);
  state_->counts.differences += books.difference.empty() ? 0 : 1;
  state_->ledger.close(scope, by, now_ms(), books);
  return books;
}

bool Objects::free(ObjectId id, const Member& by, Freed reason) {
  state_->check_process();
  Dead dead;
  std::lock_guard lock(state_->mutex);
  if (state_->slots.live(id) == nullptr) {
    // Consumers may keep what went with its last fetch.
    if (state_->was_given_out(id) && !state_->consumers.all().empty()) {
      state_->withdrawn.push_back(id);
    }
    return false;
  }
  state_->free_slot(id.slot, by, reason, now_ms(), dead);
  return true;
}

std::vector<ObjectId> Objects::take_withdrawn() {
  std::lock_guard lock(state_->mutex);
  return std::exchange(state_->withdrawn, {});
}

}  // namespace tenure::store
