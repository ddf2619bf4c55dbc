// Ledger: the one answer to "who holds this storage". It owns the tree of scopes and the table of
// leases, and adds them up. There is one for a process, reached through ledger(); a forked child
// starts an empty one and leaves its parent's alone. Any thread may call any method.
#pragma once

#include <tenure/core/fence.h>
#include <tenure/core/lease_table.h>
#include <tenure/core/scope_tree.h>

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace tenure {

// All leases at one moment, as columns: row i of each describes lease i.
struct Snapshot {
  uint64_t when = 0;  // coarse_nanoseconds()
  std::vector<uint64_t> storage;
  std::vector<uint64_t> bytes;
  std::vector<uint64_t> scope;
  std::vector<uint64_t> taken;  // coarse_nanoseconds()
  std::vector<uint32_t> owner;
  std::vector<uint16_t> device;

  size_t size() const { return storage.size(); }
  // Largest first. A storage counts once for each owner or scope that holds it.
  std::vector<std::pair<OwnerId, Totals>> by_owner() const;
  std::vector<std::pair<ScopeId, Totals>> by_scope() const;
  uint64_t bytes_once() const;
};
Snapshot columns_of(const std::vector<LeaseRow>& rows);

class Ledger {
 public:
  explicit Ledger(LeaseTable::ObjectOps ops, uint64_t first_scope = 1);

  ScopeTree& scopes() { return scopes_; }
  LeaseTable& leases() { return leases_; }

  // Exact whenever no call is in flight, a consistent cut otherwise. Of a storage that PyTorch
  // resized while it is leased, totals say the size it had until it is leased again or a snapshot
  // is made; a snapshot says the size it has.
  KindTotals totals();
  Snapshot snapshot();
  // Begins a new interval for the high-water marks; returns the one that ended.
  KindTotals start_interval();

  // Keeps the lease until the fence is ready; until then it counts, in the process scope.
  void release_after(LeaseKey key, Fence fence);
  // Ends leases whose fence has become ready. Called by everything here and when a scope closes.
  void sweep();

 private:
  ScopeTree scopes_;
  LeaseTable leases_;
  std::mutex waiting_mutex_;
  std::vector<std::pair<LeaseKey, Fence>> waiting_;
  std::atomic<size_t> waiting_count_{0};
};

Ledger& ledger();

// How the ledger keeps and drops what it holds. Defined beside StorageRef; a build without torch
// brings its own.
LeaseTable::ObjectOps storage_ops();

}  // namespace tenure
