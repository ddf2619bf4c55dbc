#include <tenure/core/lease_table.h>

#include <tenure/core/events.h>
#include <tenure/core/lease_shard.h>
#include <tenure/core/ticks.h>

#include <algorithm>
#include <bit>
#include <mutex>
#include <utility>

namespace tenure {
namespace {

constexpr uint32_t kShardBits = std::countr_zero(kShards);

void record(EventType type, const LeaseRow& row) {
  // A row is filled in only while events are on; one turned on in between has no storage yet.
  if (events_on() && row.storage != 0) {
    append({.ticks = ticks(),
            .storage = row.storage,
            .bytes = row.bytes,
            .scope = static_cast<uint64_t>(row.scope),
            .owner = static_cast<uint32_t>(row.owner),
            .type = type,
            .device = row.device});
  }
}

}  // namespace

class LeaseTable::AllLocked {
 public:
  explicit AllLocked(const LeaseTable& table) : table_(table) {
    for (size_t i = 0; i < kShards; ++i) {
      table_.shards_[i].mutex.lock();
    }
  }
  ~AllLocked() {
    for (size_t i = kShards; i-- > 0;) {
      table_.shards_[i].mutex.unlock();
    }
  }
  AllLocked(const AllLocked&) = delete;
  AllLocked& operator=(const AllLocked&) = delete;

 private:
  const LeaseTable& table_;
};

// Note [Peaks]
// A peak is a property of the sum over all shards, so an exact one needs a counter that every take
// and release of every thread writes, and that one cache line would be all that they compete for.
// Once more than one thread takes leases, a shard therefore keeps changes of up to kSlack bytes to
// itself. Bytes stay exact, for a reader adds up under all locks; a peak may be off by what 64
// shards keep back, 1 MiB. As long as one thread takes and releases leases nothing is kept back,
// and the counters are written without atomic additions: the second thread to come takes all locks
// before it changes that, and every writer holds one.
constexpr int64_t kSlack = int64_t{16} * 1024;

inline void LeaseTable::Counter::publish_alone(int64_t delta) {
  const auto now = bytes.load(std::memory_order_relaxed) + delta;
  bytes.store(now, std::memory_order_relaxed);
  if (now > peak.load(std::memory_order_relaxed)) {
    peak.store(now, std::memory_order_relaxed);
  }
}

void LeaseTable::Counter::publish(int64_t delta) {
  if (delta == 0) {
    return;
  }
  const auto now = bytes.fetch_add(delta, std::memory_order_relaxed) + delta;
  if (delta < 0) {
    return;
  }
  auto seen = peak.load(std::memory_order_relaxed);
  while (now > seen && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
}

// REQUIRES: the shard's lock.
inline void LeaseTable::add(LeaseShard& shard, size_t counter, int64_t delta) {
  const auto slack = slack_.load(std::memory_order_relaxed);
  if (slack == 0) {
    counters_[counter].publish_alone(delta);
    return;
  }
  auto& kept = shard.unpublished[counter];
  kept += delta;
  if (kept > slack || kept < -slack) {
    counters_[counter].publish(kept);
    kept = 0;
  }
}

inline void LeaseTable::notice_thread() {
  const auto me = this_thread_number();
  const auto first = first_thread_.load(std::memory_order_relaxed);
  if (first == me || slack_.load(std::memory_order_relaxed) != 0) [[likely]] {
    return;
  }
  uint64_t nobody = 0;
  if (!first_thread_.compare_exchange_strong(nobody, me, std::memory_order_relaxed)) {
    AllLocked locked(*this);
    slack_.store(kSlack, std::memory_order_relaxed);
  }
}

LeaseTable::LeaseTable(ObjectOps ops, ScopeTree& scopes)
    : ops_(ops), scopes_(scopes), shards_(std::make_unique<LeaseShard[]>(kShards)) {
  for (uint32_t i = 0; i < kShards; ++i) {
    shards_[i].number = i;
  }
}

LeaseTable::~LeaseTable() {
  for (size_t i = 0; i < kShards; ++i) {
    shards_[i].each_live([&](const LeaseSlot& slot) { ops_.drop(slot.object); });
  }
}

inline LeaseShard& LeaseTable::shard_of(const void* object) const {
  return shards_[object_hash(object) >> (64 - kShardBits)];
}

inline LeaseSlot* LeaseTable::find(LeaseShard& shard, LeaseKey key) const {
  if (key.generation == 0 || key.index >= shard.used) {
    return nullptr;
  }
  auto& slot = shard.at(key.index);
  return slot.generation == key.generation ? &slot : nullptr;
}

// Note [A lease enters a scope]
// A scope may be closed by one thread while another takes a lease in it. The taker, holding the
// shard's lock, first sets the scope's bit for this shard and then looks whether the scope is still
// open; the closer first marks the scope closed and then reads the bits. Both sides are
// sequentially consistent, so either the taker sees the scope closed, and goes to the process scope
// instead, or the closer sees the bit, waits for the shard's lock, and finds the lease. No lease is
// left behind in a closed scope, and neither side takes a lock that all takers share.
inline void LeaseTable::enter_scope(LeaseShard& shard, uint32_t index, ScopeId wanted) {
  auto* node = scopes_.find(wanted);
  const auto bit = uint64_t{1} << shard.number;
  if (node != nullptr) {
    if ((node->touched.load(std::memory_order_seq_cst) & bit) == 0) {
      node->touched.fetch_or(bit, std::memory_order_seq_cst);
    }
    if (node->id.load(std::memory_order_seq_cst) != static_cast<uint64_t>(wanted)) {
      node = nullptr;
    }
  }
  if (node == nullptr) {
    wanted = ScopeId::process;
    node = &scopes_.place(wanted);  // never closes, so its bits do not matter
  }
  auto& slot = shard.at(index);
  auto& first = first_of(shard, *node);
  slot.scope = static_cast<uint64_t>(wanted);
  slot.scope_prev = kNoSlot;
  slot.scope_next = first == 0 ? kNoSlot : first - 1;
  if (slot.scope_next != kNoSlot) {
    shard.at(slot.scope_next).scope_prev = index;
  }
  first = index + 1;  // 0 is the empty list, so that a fresh node needs no set-up
}

// All threads use the process scope, so its list heads lie apart, in the shards.
inline uint32_t& LeaseTable::first_of(LeaseShard& shard, ScopeNode& node) {
  const bool process = node.id.load(std::memory_order_relaxed) == 0;
  return process ? shard.first_in_process : node.first[shard.number];
}

inline void LeaseTable::leave_scope(LeaseShard& shard, uint32_t index) {
  auto& slot = shard.at(index);
  if (slot.scope_next != kNoSlot) {
    shard.at(slot.scope_next).scope_prev = slot.scope_prev;
  }
  if (slot.scope_prev != kNoSlot) {
    shard.at(slot.scope_prev).scope_next = slot.scope_next;
  } else {
    first_of(shard, scopes_.place(ScopeId{slot.scope})) =
        slot.scope_next == kNoSlot ? 0 : slot.scope_next + 1;
  }
}

// How an object is held already, seen from a lease of some kind that is not in its chain.
struct LeaseTable::Sharing {
  const LeaseSlot* other = nullptr;  // any other lease on the object
  bool same_kind = false;            // whether one of them is of that kind
};

inline LeaseTable::Sharing LeaseTable::sharing(LeaseShard& shard, const void* object,
                                               OwnerKind kind) {
  Sharing out;
  shard.each_lease_on(object, [&](const LeaseSlot& other) {
    out.other = &other;
    out.same_kind = kind_of(OwnerId{other.owner}) == kind;
    return !out.same_kind;
  });
  return out;
}

// Adds or takes away what a lease contributes beside the others on its object.
inline void LeaseTable::count(LeaseShard& shard, const LeaseSlot& slot, const Sharing& shared,
                              int sign) {
  const auto kind = static_cast<size_t>(kind_of(OwnerId{slot.owner}));
  const auto bytes = static_cast<int64_t>(slot.bytes) * sign;
  if (!shared.same_kind) {
    add(shard, kind, bytes);
  }
  if (shared.other == nullptr) {
    add(shard, kAll, bytes);
  }
  shard.leases[kind] += static_cast<uint32_t>(sign);
}

// Note [Bytes of a lease]
// A storage may be resized, released or refilled while leases hold it. Each slot has the bytes that
// the totals count for it; the object itself has those of now, and can be asked, because a lease
// keeps it alive. Asked under the shard's lock, so that of a take and a release at the same time
// the later one is right: whoever changes the data calls set_bytes after that. What describes one
// lease, and a table of all, asks each object; totals do not, as that would read every object.
// They learn of a resize when the storage is leased again or a table of all leases is made.
inline uint64_t LeaseTable::bytes_now(const void* object, uint64_t otherwise) const {
  return ops_.bytes != nullptr ? ops_.bytes(object) : otherwise;
}

LeaseRow LeaseTable::row_now(const LeaseSlot& slot) const {
  auto row = slot.row();
  row.bytes = bytes_now(slot.object, row.bytes);
  return row;
}

// REQUIRES: the shard's lock, and notice_thread() before it, or all locks.
void LeaseTable::recount(LeaseShard& shard, const void* object, uint64_t bytes) {
  std::array<bool, kOwnerKinds> seen{};
  bool any = false;
  shard.each_lease_on(object, [&](LeaseSlot& slot) {
    const auto delta = static_cast<int64_t>(bytes) - static_cast<int64_t>(slot.bytes);
    const auto kind = static_cast<size_t>(kind_of(OwnerId{slot.owner}));
    if (!seen.at(kind)) {
      add(shard, kind, delta);
    }
    if (!any) {
      add(shard, kAll, delta);
    }
    seen.at(kind) = any = true;
    slot.bytes = bytes;
    return true;
  });
}

LeaseKey LeaseTable::take(void* object, uint64_t bytes, uint16_t device, OwnerId owner,
                          ScopeId scope) {
  notice_thread();
  auto& shard = shard_of(object);
  const auto now = coarse_nanoseconds();
  LeaseKey key;
  LeaseRow taken;
  {
    std::unique_lock lock(shard.mutex);
    uint32_t index = 0;
    try {
      index = shard.allocate();
    } catch (...) {
      lock.unlock();
      ops_.drop(object);
      throw;
    }
    auto& slot = shard.at(index);
    const auto shared = sharing(shard, object, kind_of(owner));
    slot.object = object;
    // A released storage counts nothing until it is refilled, and the others know whether it is.
    bytes = bytes_now(object, shared.other != nullptr ? uint64_t{shared.other->bytes} : bytes);
    if (shared.other != nullptr && shared.other->bytes != bytes) {
      recount(shard, object, bytes);
    }
    slot.bytes = bytes;
    slot.device = device;
    slot.taken = now;
    slot.owner = static_cast<uint32_t>(owner);
    slot.storage = shared.other != nullptr ? shared.other->storage
                                           : (shard.next_storage++ << kShardBits) | shard.number;
    count(shard, slot, shared, +1);
    shard.link_chain(index);
    enter_scope(shard, index, scope);
    ++shard.live;
    ++slot.generation;
    key = {index, slot.generation, shard.number};
    if (events_on()) {
      taken = slot.row();
    }
  }
  record(EventType::lease_taken, taken);
  return key;
}

// REQUIRES: the shard's lock; the caller drops the object after letting it go.
inline void* LeaseTable::end(LeaseShard& shard, uint32_t index) {
  auto& slot = shard.at(index);
  leave_scope(shard, index);
  shard.unlink_chain(index);
  count(shard, slot, sharing(shard, slot.object, kind_of(OwnerId{slot.owner})), -1);
  --shard.live;
  ++slot.generation;
  slot.chain_next = shard.free;
  shard.free = index;
  return slot.object;
}

bool LeaseTable::release(LeaseKey key) {
  notice_thread();
  auto& shard = shards_[key.shard];
  void* object = nullptr;
  LeaseRow released;
  {
    std::lock_guard lock(shard.mutex);
    const auto* slot = find(shard, key);
    if (slot == nullptr) {
      return false;
    }
    if (events_on()) {
      released = slot->row();
    }
    object = end(shard, key.index);
  }
  record(EventType::lease_released, released);
  ops_.drop(object);
  return true;
}

bool LeaseTable::move(LeaseKey key, ScopeId scope) {
  auto& shard = shards_[key.shard];
  LeaseRow moved;
  {
    std::lock_guard lock(shard.mutex);
    const auto* slot = find(shard, key);
    if (slot == nullptr) {
      return false;
    }
    leave_scope(shard, key.index);
    enter_scope(shard, key.index, scope);
    moved = slot->row();
  }
  record(EventType::lease_moved, moved);
  return true;
}

std::optional<LeaseRow> LeaseTable::row(LeaseKey key) const {
  auto& shard = shards_[key.shard];
  std::lock_guard lock(shard.mutex);
  const auto* slot = find(shard, key);
  return slot == nullptr ? std::nullopt : std::optional(row_now(*slot));
}

void* LeaseTable::share(LeaseKey key) const {
  auto& shard = shards_[key.shard];
  std::lock_guard lock(shard.mutex);
  const auto* slot = find(shard, key);
  if (slot == nullptr) {
    return nullptr;
  }
  ops_.retain(slot->object);
  return slot->object;
}

void LeaseTable::set_bytes(void* object, uint64_t bytes) {
  notice_thread();
  auto& shard = shard_of(object);
  std::lock_guard lock(shard.mutex);
  recount(shard, object, bytes_now(object, bytes));
}

std::vector<LeaseRow> LeaseTable::rows_of(void* object) const {
  auto& shard = shard_of(object);
  std::vector<LeaseRow> out;
  std::lock_guard lock(shard.mutex);
  shard.each_lease_on(object, [&](const LeaseSlot& slot) {
    out.push_back(row_now(slot));
    return true;
  });
  return out;
}

std::vector<LeaseRow> LeaseTable::empty_scope(ScopeNode& node, OnClose on_close) {
  std::vector<LeaseRow> rows;
  // Read after the node was marked closed: see Note [A lease enters a scope].
  for (auto touched = node.touched.load(std::memory_order_seq_cst); touched != 0;
       touched &= touched - 1) {
    notice_thread();
    auto& shard = shards_[static_cast<size_t>(std::countr_zero(touched))];
    std::vector<void*> ended;
    {
      std::lock_guard lock(shard.mutex);
      while (node.first[shard.number] != 0) {
        const auto index = node.first[shard.number] - 1;
        rows.push_back(row_now(shard.at(index)));
        if (on_close == OnClose::release) {
          ended.push_back(end(shard, index));
        } else {
          leave_scope(shard, index);
          enter_scope(shard, index, node.parent);
        }
      }
    }
    for (auto* object : ended) {
      ops_.drop(object);
    }
  }
  if (events_on()) {
    for (auto row : rows) {
      if (on_close == OnClose::release) {
        record(EventType::lease_released, row);
      } else {
        row.scope = node.parent;
        record(EventType::lease_moved, row);
      }
    }
  }
  node.touched.store(0, std::memory_order_relaxed);
  return rows;
}

// REQUIRES: all locks.
KindTotals LeaseTable::read_totals() {
  std::array<Totals, kOwnerKinds + 1> read;
  for (size_t i = 0; i < counters_.size(); ++i) {
    int64_t unpublished = 0;
    for (size_t j = 0; j < kShards; ++j) {
      unpublished += std::exchange(shards_[j].unpublished[i], 0);
    }
    counters_[i].publish(unpublished);
    read[i].bytes = static_cast<uint64_t>(counters_[i].bytes.load(std::memory_order_relaxed));
    read[i].peak = static_cast<uint64_t>(counters_[i].peak.load(std::memory_order_relaxed));
  }
  KindTotals out{.all = read[kAll], .by_kind = {}};
  std::copy_n(read.begin(), kOwnerKinds, out.by_kind.begin());
  // Shards outside, kinds inside: the other way round GCC 12 and 13 at -O3 load `leases` with
  // movdqa, though it lies at 4 modulo 16.
  for (size_t j = 0; j < kShards; ++j) {
    for (size_t kind = 0; kind < kOwnerKinds; ++kind) {
      out.by_kind[kind].leases += shards_[j].leases[kind];
      out.all.leases += shards_[j].leases[kind];
    }
  }
  return out;
}

KindTotals LeaseTable::totals() {
  AllLocked locked(*this);
  return read_totals();
}

KindTotals LeaseTable::start_interval() {
  AllLocked locked(*this);
  auto out = read_totals();
  for (auto& counter : counters_) {
    counter.peak.store(counter.bytes.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  return out;
}

std::vector<LeaseRow> LeaseTable::rows() {
  // Room is made, and its pages are touched, before anyone has to wait.
  std::vector<LeaseRow> out(totals().all.leases * 9 / 8 + 64);
  out.clear();
  AllLocked locked(*this);
  for (size_t i = 0; i < kShards; ++i) {
    shards_[i].each_live([&](const LeaseSlot& slot) {
      out.push_back(row_now(slot));
      if (out.back().bytes != slot.bytes) {
        recount(shards_[i], slot.object, out.back().bytes);
      }
    });
  }
  return out;
}

}  // namespace tenure
