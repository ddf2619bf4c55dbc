#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/errors.h>
#include <tenure/store/objects_state.h>

#include <algorithm>
#include <utility>

namespace tenure::store {

ConsumerId Objects::admit(const Member& member) {
  check_member(member);
  std::lock_guard lock(state_->mutex);
  return state_->consumers.admit(member, state_->clock() + state_->limits.lease_ms);
}

void Objects::parted(ConsumerId consumer) {
  std::lock_guard lock(state_->mutex);
  state_->consumers.part(consumer, state_->clock() + state_->limits.lease_ms);
}

void Objects::renew(ConsumerId consumer) {
  std::lock_guard lock(state_->mutex);
  state_->consumers.renew(consumer, state_->clock() + state_->limits.lease_ms);
}

size_t Objects::expire() {
  auto& state = *state_;
  Dead dead;
  std::lock_guard lock(state.mutex);
  const auto lapse = state.consumers.lapse(state.clock());
  const auto at_ms = now_ms();
  for (const auto& gone : lapse.members) {
    const Member& member = gone.member;
    const auto lose = [&](uint32_t index, uint32_t claims) {
      auto& slot = state.slots.at(index);
      state.counts.expired += claims;
      if (claims != 0 && state.claims.done(slot.claim, slot.pending)) {
        state.free_slot(index, member, Freed::expired, at_ms, dead);
      }
    };
    for (const auto id : gone.begun) {
      if (auto* const slot = state.slots.live(id)) {
        lose(id.slot, state.claims.give_up(slot->claim, slot->pending, member) ? 1 : 0);
      }
    }
    const bool others = std::ranges::any_of(state.consumers.all(), [&](const auto& entry) {
      return !entry.second.lapsed && entry.second.member.rank == member.rank;
    });
    const auto is = others ? Claims::OfItsRank::others : Claims::OfItsRank::alone;
    for (auto index = state.slots.next_live(0); index != state.slots.end();
         index = state.slots.next_live(index + 1)) {
      auto& slot = state.slots.at(index);
      lose(index, state.claims.lapse(slot.claim, slot.pending, member, is));
    }
  }
  return lapse.consumers;
}

std::shared_ptr<const Content> Objects::content(ObjectId id) const {
  state_->check_process();
  const std::lock_guard lock(state_->mutex);
  const auto* slot = state_->slots.live(id);
  return slot == nullptr ? nullptr : slot->content;
}

std::shared_ptr<const Content> Objects::open_content(ObjectId id) const {
  state_->check_process();
  const std::lock_guard lock(state_->mutex);
  const auto* slot = state_->slots.live(id);
  if (slot == nullptr || state_->claims.collectors(slot->claim).kind != Collectors::Kind::anyone) {
    return nullptr;
  }
  return slot->content;
}

Fetched Objects::fetch(ConsumerId consumer, ObjectId id, Rows rows) {
  auto& state = *state_;
  state.check_process();
  std::lock_guard lock(state.mutex);
  auto* who = state.consumers.find(consumer);
  if (who == nullptr) {
    throw AccessRefused(text("a consumer that ", member_text(state.self),
                             " does not know, or knows no longer, asked for an object: connect "
                             "again"));
  }
  state.consumers.renew(consumer, state.clock() + state.limits.lease_ms);
  const auto* slot = state.slots.live(id);
  if (slot == nullptr) {
    ++state.counts.stale;
    throw StaleHandle(state.stale_text(id));
  }
  if (!state.claims.may_fetch(slot->claim, who->member)) {
    throw AccessRefused(state.not_yours_text(id, *slot, who->member));
  }
  auto extent = extent_of(state.layouts.at(slot->layout), rows);
  if (state.claims.collectors(slot->claim).kind != Collectors::Kind::anyone) {
    who->begun.add(id, [&](ObjectId old) { return state.slots.live(old) != nullptr; });
  }
  ++state.counts.fetches;
  state.counts.fetched_bytes += extent.bytes;
  return {std::move(extent.layout), extent.offset, extent.bytes, slot->content};
}

void Objects::fetched(ConsumerId consumer, ObjectId id) {
  auto& state = *state_;
  Dead dead;
  std::lock_guard lock(state.mutex);
  auto* who = state.consumers.find(consumer);
  if (who == nullptr) {
    return;
  }
  const bool was_given_up = who->begun.end(id);
  auto* slot = state.slots.live(id);
  if (slot == nullptr || was_given_up) {
    return;
  }
  if (state.claims.fill(slot->claim, slot->pending, who->member)) {
    state.free_slot(id.slot, who->member, Freed::fetched, now_ms(), dead);
  }
}

void Objects::mapped(ConsumerId consumer, ObjectId id) {
  auto& state = *state_;
  std::lock_guard lock(state.mutex);
  auto* who = state.consumers.find(consumer);
  const auto* known = state.slots.known(id);
  if (who == nullptr || known == nullptr) {
    return;
  }
  auto& entry = who->mapped[id];
  if (entry.times++ != 0) {
    return;
  }
  entry.since_ms = now_ms();
  entry.bytes = bytes_of(state.layouts.at(known->layout));
  entry.scope = state.ledger.at(known->line).scope;
  entry.content = known->content;
  if (auto* slot = state.slots.live(id)) {
    slot->mapped = 1;
  }
}

void Objects::unmapped(ConsumerId consumer, ObjectId id) {
  std::lock_guard lock(state_->mutex);
  auto* who = state_->consumers.find(consumer);
  if (who == nullptr) {
    return;
  }
  const auto entry = who->mapped.find(id);
  if (entry != who->mapped.end() && --entry->second.times == 0) {
    who->mapped.erase(entry);
  }
}

}  // namespace tenure::store
