// LeaseTable: every strong reference that Tenure holds, in one place. It stores opaque objects (in
// the product: c10::StorageImpl) with one reference each, so that its threading can be tested
// without torch. Any thread may call any method; an object's last reference is always dropped
// outside the locks, because a deleter may run anything, this table included.
#pragma once

#include <tenure/core/owner.h>
#include <tenure/core/scope_tree.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace tenure {

struct LeaseShard;
struct LeaseSlot;

// Names one lease. Plain data; a key of a lease that has ended is recognised as such.
struct LeaseKey {
  uint32_t index = 0;
  uint32_t generation = 0;  // 0: no lease
  uint32_t shard = 0;
};

// What is known of one lease, by value.
struct LeaseRow {
  uint64_t storage = 0;  // id of the storage while it is held, never reused
  uint64_t bytes = 0;
  uint64_t taken = 0;  // coarse_nanoseconds()
  ScopeId scope = ScopeId::process;
  OwnerId owner{};
  uint16_t device = 0;
};

// A storage counts once in `bytes`, however many leases hold it.
struct Totals {
  uint64_t bytes = 0;
  uint64_t leases = 0;
  // Most bytes since the interval began: exact as long as one thread takes and releases leases, to
  // within 1 MiB once several do. See Note [Peaks].
  uint64_t peak = 0;
};

struct KindTotals {
  Totals all;
  std::array<Totals, kOwnerKinds> by_kind;
};

class LeaseTable {
 public:
  struct ObjectOps {
    void (*retain)(void*);
    void (*drop)(void*);
    // Its bytes now. Called under a lock of the table, so it takes none of its own. Null: bytes
    // change only through set_bytes.
    uint64_t (*bytes)(const void*) = nullptr;
  };

  LeaseTable(ObjectOps ops, ScopeTree& scopes);
  ~LeaseTable();
  LeaseTable(const LeaseTable&) = delete;
  LeaseTable& operator=(const LeaseTable&) = delete;

  // Takes over one reference to `object`, also when it throws. A scope that is closed by now counts
  // as the process scope. Bytes must be below 2^48; where there is ObjectOps::bytes, its answer
  // counts instead. See Note [Bytes of a lease].
  LeaseKey take(void* object, uint64_t bytes, uint16_t device, OwnerId owner, ScopeId scope);

  // False: the lease had ended before.
  bool release(LeaseKey key);
  bool move(LeaseKey key, ScopeId scope);
  std::optional<LeaseRow> row(LeaseKey key) const;
  // The object with a reference of the caller's own, or null.
  void* share(LeaseKey key) const;

  // The object's memory went, came back or changed its size while leases hold it. As for take(),
  // ObjectOps::bytes has the last word.
  void set_bytes(void* object, uint64_t bytes);

  // Leases on one object, newest first.
  std::vector<LeaseRow> rows_of(void* object) const;

  // Ends or moves the leases of a scope between ScopeTree::begin_close and end_close. Returns them
  // as they were.
  std::vector<LeaseRow> empty_scope(ScopeNode& node, OnClose on_close);

  // A consistent cut: as if all threads had stopped between two calls.
  KindTotals totals();
  std::vector<LeaseRow> rows();
  // Starts peaks anew and returns the totals, with the peaks of the interval that ended.
  KindTotals start_interval();

 private:
  struct Sharing;
  struct Counter {
    alignas(64) std::atomic<int64_t> bytes{0};
    std::atomic<int64_t> peak{0};
    void publish(int64_t delta);
    void publish_alone(int64_t delta);  // REQUIRES: no other thread publishes
  };
  static constexpr size_t kAll = kOwnerKinds;  // the counter of everything, after those of kinds
  class AllLocked;

  LeaseShard& shard_of(const void* object) const;
  LeaseSlot* find(LeaseShard& shard, LeaseKey key) const;
  void enter_scope(LeaseShard& shard, uint32_t index, ScopeId wanted);
  static uint32_t& first_of(LeaseShard& shard, ScopeNode& node);
  void leave_scope(LeaseShard& shard, uint32_t index);
  static Sharing sharing(LeaseShard& shard, const void* object, OwnerKind kind);
  void count(LeaseShard& shard, const LeaseSlot& slot, const Sharing& shared, int sign);
  void add(LeaseShard& shard, size_t counter, int64_t delta);
  void notice_thread();
  void* end(LeaseShard& shard, uint32_t index);
  uint64_t bytes_now(const void* object, uint64_t otherwise) const;
  LeaseRow row_now(const LeaseSlot& slot) const;
  void recount(LeaseShard& shard, const void* object, uint64_t bytes);
  KindTotals read_totals();

  const ObjectOps ops_;
  ScopeTree& scopes_;
  std::array<Counter, kOwnerKinds + 1> counters_;
  alignas(64) std::atomic<uint64_t> first_thread_{0};
  std::atomic<int64_t> slack_{0};
  std::unique_ptr<LeaseShard[]> shards_;
};

}  // namespace tenure
