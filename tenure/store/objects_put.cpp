#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/objects_state.h>
#include <tenure/store/segment.h>

#include <algorithm>
#include <utility>

namespace tenure::store {

std::string_view place_name(const Content& content) {
  if (content.descriptor() >= 0) {
    return "memfd";
  }
  return content.memory().data() != nullptr ? "slab" : "disk";
}

std::optional<std::string> Objects::State::refusal(const Terms& terms, uint32_t attempt) {
  std::optional<std::string> why;
  if (terms.collectors.nobody()) {
    why = "nobody collects it";
  } else if (const auto word = ledger.closed(terms.scope)) {
    why = word->by ? text(scope_text(terms.scope), " was closed by ", member_text(*word->by),
                          " at ", time_text(word->at_ms))
                   : text(scope_text(terms.scope), " was closed long ago");
    ledger.count_dropped(terms.scope);
    ++counts.dropped;
  } else if (ledger.attempt(terms.scope, terms.call) != attempt) {
    why = text("call ", terms.call, " was begun again or failed meanwhile");
  }
  counts.unstored += why ? 1 : 0;
  return why;
}

std::shared_ptr<const Content> Objects::State::make_content(const Source& source) {
  for (;;) {
    std::string lack;
    if (source.bytes() <= limits.small_bytes) {
      if (auto piece = slabs->take(source.bytes(), lack)) {
        return make_slab_content(source, std::move(*piece));
      }
    } else if (auto charge = room->take(segment_bytes(source.bytes()), lack)) {
      if (auto segment = make_segment(source, *charge)) {
        return segment;
      }
      return make_lone_slab(source, std::move(*charge));
    }
    if (!disk) {
      throw BudgetError(text("no room for an object of ", bytes_text(source.bytes()),
                             " in the store of ", member_text(self), ": ", lack,
                             "; close scopes or let collectors fetch first, raise the cap, or let "
                             "the store spill to disk"));
    }
    if (!spill_one()) {
      return disk->store(source);
    }
  }
}

bool Objects::State::busy(ObjectId id, const Slot& slot) const {
  // A mapped one would keep its memory, by its mapper.
  if (slot.mapped != 0 && std::ranges::any_of(consumers.all(), [&](const auto& consumer) {
        return consumer.second.mapped.contains(id);
      })) {
    return true;
  }
  const auto handles = slot.shared != 0 ? sharers.at(slot.content.get()).size() : 1;
  return static_cast<size_t>(slot.content.use_count()) > handles;
}

void Objects::State::replace_content(uint32_t index, const std::shared_ptr<const Content>& content,
                                     Dead& dead) {
  auto& slot = slots.at(index);
  if (slot.shared == 0) {
    dead.push_back(std::exchange(slot.content, content));
    return;
  }
  auto sharing = sharers.extract(slot.content.get());
  for (const auto sharer : sharing.mapped()) {
    dead.push_back(std::exchange(slots.at(sharer).content, content));
  }
  sharing.key() = content.get();
  sharers.insert(std::move(sharing));
}

bool Objects::State::spill_one() {
  ObjectId id;
  std::shared_ptr<const Content> content;
  {
    std::lock_guard lock(mutex);
    for (auto left = ages.size(); left > 0 && !content; --left) {
      const auto oldest = ages.take_oldest();
      if (!oldest) {
        break;
      }
      id = *oldest;
      const auto* slot = slots.live(id);
      if (slot == nullptr || place_name(*slot->content) == "disk") {
        continue;
      }
      if (busy(id, *slot)) {
        ages.add(id, [](ObjectId) { return true; });
        continue;
      }
      content = slot->content;
    }
  }
  if (!content) {
    return false;
  }
  std::shared_ptr<const Content> spilled;
  try {
    spilled = disk->store(*content);
  } catch (...) {
    std::lock_guard lock(mutex);
    ages.add_oldest(id);
    throw;
  }
  Dead dead;
  std::lock_guard lock(mutex);
  const auto* slot = slots.live(id);
  if (slot == nullptr || slot->content != content) {
    dead.push_back(std::move(content));
    return true;
  }
  content.reset();  // of what keeps it busy
  if (busy(id, *slot)) {
    ages.add(id, [](ObjectId) { return true; });
  } else {
    replace_content(id.slot, spilled, dead);
  }
  return true;
}

ObjectId Objects::State::enter(const Terms& terms, std::shared_ptr<const Content> content) {
  const auto line = ledger.line(terms.scope, terms.call, terms.site);
  const auto layout = layouts.take(terms.layout);
  const auto claim = claims.take(terms.collectors);
  const auto index = slots.take();
  auto& slot = slots.at(index);
  if (slot.state == Slot::State::freed) {
    ledger.drop(slot.line);
    layouts.drop(slot.layout);
    const auto forgotten =
        departed.add({.slot = index, .generation = slot.generation - 1},
                     {.by = slot.by, .reason = slot.reason, .at_ms = slot.at_ms});
    if (forgotten) {
      members.drop(forgotten->by);
    }
  }
  auto& owner = ledger.at(line);
  ledger.hold(line);
  ++owner.tally.stored;
  owner.tally.stored_bytes += content->bytes();
  ++counts.objects;
  ++counts.put_objects;
  counts.put_bytes += content->bytes();

  slot = {.content = std::move(content),
          .pending = claim.pending,
          .at_ms = now_ms(),
          .generation = slot.generation,
          .line = line,
          .layout = layout,
          .claim = claim.set,
          .next = owner.first,
          .state = Slot::State::live};
  if (owner.first != kNoSlot) {
    slots.at(owner.first).before = index;
  }
  owner.first = index;
  const ObjectId id{index, slot.generation};
  if (disk && place_name(*slot.content) != "disk") {
    ages.add(id, [this](ObjectId old) { return slots.live(old) != nullptr; });
  }
  return id;
}

Placed Objects::State::place(const Terms& terms, const Source& source) {
  check_process();
  check_scope(terms.scope);
  check_collectors(terms.collectors);
  if (const auto bytes = bytes_of(terms.layout); bytes != source.bytes()) {
    throw InputError(text(source.bytes(), " bytes were put for a layout of ", bytes));
  }
  uint32_t attempt = 0;
  {
    std::lock_guard lock(mutex);
    attempt = terms.attempt.value_or(ledger.attempt(terms.scope, terms.call));
    if (auto why = refusal(terms, attempt)) {
      return {{}, std::move(*why)};
    }
  }
  // Note [Bytes move outside the lock]
  auto content = make_content(source);
  std::lock_guard lock(mutex);
  if (auto why = refusal(terms, attempt)) {
    return {{}, std::move(*why)};
  }
  return {enter(terms, std::move(content)), {}};
}

Placed Objects::put(const Terms& terms, std::span<const std::byte> bytes) {
  return state_->place(terms, Source(bytes));
}

Placed Objects::put(const Terms& terms, uint64_t piece_bytes,
                    const std::function<void(uint64_t offset, std::span<std::byte> piece)>& fill) {
  if (piece_bytes == 0) {
    throw InputError("pieces of 0 bytes never fill an object");
  }
  return state_->place(terms, Source(bytes_of(terms.layout), piece_bytes, fill));
}

Placed Objects::put_again(const Terms& terms, ObjectId of) {
  auto& state = *state_;
  state.check_process();
  check_scope(terms.scope);
  check_collectors(terms.collectors);
  const auto bytes = bytes_of(terms.layout);
  std::lock_guard lock(state.mutex);
  const auto latest = state.ledger.attempt(terms.scope, terms.call);
  if (auto why = state.refusal(terms, terms.attempt.value_or(latest))) {
    return {{}, std::move(*why)};
  }
  auto* first = state.slots.live(of);
  if (first == nullptr) {
    ++state.counts.unstored;
    return {{}, "gone"};
  }
  if (bytes != first->content->bytes()) {
    throw InputError(
        text("a layout of ", bytes, " bytes for an object of ", first->content->bytes()));
  }
  auto& sharing = state.sharers[first->content.get()];
  if (sharing.empty()) {
    sharing.insert(of.slot);
    first->shared = 1;
  }
  const auto id = state.enter(terms, first->content);
  sharing.insert(id.slot);
  state.slots.at(id.slot).shared = 1;
  return {id, {}};
}

}  // namespace tenure::store
