#include <tenure/store/slots.h>

#include <tenure/core/error.h>

#include <limits>

namespace tenure::store {

uint32_t Slots::take() {
  if (free_ > kWordsKept || (free_ > 0 && end_ == kNoSlot)) {
    const auto index = first_free_;
    auto& slot = at(index);
    first_free_ = slot.next;
    --free_;
    if (first_free_ == kNoSlot) {
      last_free_ = kNoSlot;
    }
    ++slot.generation;
    ++chunks_[index / kChunk]->live;
    return index;
  }
  if (end_ == kNoSlot) {
    throw BudgetError("2^32 objects were put and none can take another's place; free some first");
  }
  if (end_ % kChunk == 0) {
    chunks_.push_back(std::make_unique<Chunk>());
  }
  const auto index = end_++;
  at(index).generation = first_;
  ++chunks_[index / kChunk]->live;
  return index;
}

void Slots::give_back(uint32_t index) {
  auto& slot = at(index);
  slot.state = Slot::State::freed;
  --chunks_[index / kChunk]->live;
  slot.next = kNoSlot;
  // Its last generation: the place is retired, with its word.
  if (slot.generation == std::numeric_limits<uint32_t>::max()) {
    return;
  }
  if (last_free_ == kNoSlot) {
    first_free_ = index;
  } else {
    at(last_free_).next = index;
  }
  last_free_ = index;
  ++free_;
}

Slot* Slots::live(ObjectId id) {
  return const_cast<Slot*>(static_cast<const Slots&>(*this).live(id));
}

const Slot* Slots::live(ObjectId id) const {
  const auto* slot = known(id);
  return slot != nullptr && slot->state == Slot::State::live ? slot : nullptr;
}

const Slot* Slots::known(ObjectId id) const {
  if (id.slot >= end_) {
    return nullptr;
  }
  const auto& slot = at(id.slot);
  return slot.generation == id.generation && slot.state != Slot::State::unused ? &slot : nullptr;
}

uint32_t Slots::next_live(uint32_t from) const {
  while (from < end_) {
    if (from % kChunk == 0 && chunks_[from / kChunk]->live == 0) {
      from += kChunk;
      continue;
    }
    if (at(from).state == Slot::State::live) {
      return from;
    }
    ++from;
  }
  return end_;
}

}  // namespace tenure::store
