// LeaseShard: one of the parts that the lease table is divided into, each with a lock of its own.
// The table locks, counts and drops references; a shard stores leases and finds them again.
// REQUIRES, of every method: the shard's lock.
#pragma once

#include <tenure/core/lease_table.h>
#include <tenure/core/lock.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace tenure {

inline constexpr uint32_t kNoSlot = ~uint32_t{0};
inline constexpr uint32_t kSlotsPerChunk = 1024;

// Fibonacci hashing: top bits choose the shard, the bits below them the bucket.
inline uint64_t object_hash(const void* object) {
  return (reinterpret_cast<uintptr_t>(object) >> 4) * 0x9E3779B97F4A7C15ULL;
}

// One lease. Linked into its scope's list for this shard, and into the chain of its hash bucket, in
// which all leases on one object lie: that is how shared storage is recognised.
struct LeaseSlot {
  void* object = nullptr;
  uint64_t bytes : 48 = 0;
  uint64_t device : 16 = 0;
  uint64_t storage = 0;
  uint64_t taken = 0;
  uint64_t scope = 0;
  uint32_t owner = 0;
  uint32_t generation = 0;  // odd while live
  uint32_t scope_next = kNoSlot, scope_prev = kNoSlot;
  uint32_t chain_next = kNoSlot, chain_prev = kNoSlot;

  bool live() const { return (generation & 1) != 0; }
  LeaseRow row() const {
    return {storage, bytes, taken, ScopeId{scope}, OwnerId{owner}, static_cast<uint16_t>(device)};
  }
};

struct LeaseShard {
  static_assert(sizeof(LeaseSlot) == 64);

  alignas(64) mutable Lock mutex;
  uint32_t number = 0;
  uint32_t used = 0;  // slots ever handed out
  uint32_t free = kNoSlot;
  uint32_t live = 0;
  uint64_t next_storage = 1;
  uint32_t first_in_process = 0;
  std::array<uint32_t, kOwnerKinds> leases{};
  std::array<int64_t, kOwnerKinds + 1> unpublished{};  // see Note [Peaks]
  std::vector<std::unique_ptr<LeaseSlot[]>> chunks;
  std::vector<uint32_t> buckets = std::vector<uint32_t>(16, kNoSlot);

  LeaseSlot& at(uint32_t index) const {
    return chunks[index / kSlotsPerChunk][index % kSlotsPerChunk];
  }
  uint32_t& bucket_of(const void* object) {
    return buckets[(object_hash(object) >> 16) & (buckets.size() - 1)];
  }

  // Everything that can fail, before anything changes.
  uint32_t allocate() {
    if (live >= buckets.size()) {
      grow_buckets();
    }
    if (free != kNoSlot) {
      const auto index = free;
      free = at(index).chain_next;
      return index;
    }
    if (used % kSlotsPerChunk == 0) {
      chunks.push_back(std::make_unique<LeaseSlot[]>(kSlotsPerChunk));
    }
    return used++;
  }

  void grow_buckets() {
    std::vector<uint32_t> wider(buckets.size() * 2, kNoSlot);
    buckets.swap(wider);
    for (uint32_t head : wider) {
      // From the end of the chain to its head, so that an object's leases keep their order.
      uint32_t last = head;
      while (last != kNoSlot && at(last).chain_next != kNoSlot) {
        last = at(last).chain_next;
      }
      while (last != kNoSlot) {
        const auto before = at(last).chain_prev;
        link_chain(last);
        last = before;
      }
    }
  }

  void link_chain(uint32_t index) {
    auto& slot = at(index);
    auto& head = bucket_of(slot.object);
    slot.chain_prev = kNoSlot;
    slot.chain_next = head;
    if (head != kNoSlot) {
      at(head).chain_prev = index;
    }
    head = index;
  }

  void unlink_chain(uint32_t index) {
    auto& slot = at(index);
    if (slot.chain_next != kNoSlot) {
      at(slot.chain_next).chain_prev = slot.chain_prev;
    }
    (slot.chain_prev != kNoSlot ? at(slot.chain_prev).chain_next : bucket_of(slot.object)) =
        slot.chain_next;
  }

  // Calls fn(slot) for each lease on `object`, newest first, until it returns false.
  template <class Fn>
  void each_lease_on(const void* object, Fn&& fn) {
    for (auto index = bucket_of(object); index != kNoSlot; index = at(index).chain_next) {
      auto& slot = at(index);
      if (slot.object == object && !fn(slot)) {
        return;
      }
    }
  }

  template <class Fn>
  void each_live(Fn&& fn) const {
    for (uint32_t index = 0; index < used; ++index) {
      if (const auto& slot = at(index); slot.live()) {
        fn(slot);
      }
    }
  }
};

}  // namespace tenure
