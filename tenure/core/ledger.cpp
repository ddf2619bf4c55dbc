#include <tenure/core/ledger.h>

#include <tenure/core/fork.h>
#include <tenure/core/ticks.h>

#include <algorithm>
#include <atomic>
#include <tuple>

namespace tenure {
namespace {

std::atomic<Ledger*> current{nullptr};

void start_anew_in_child() {
  // The parent's ledger is left as it is: its locks may be held by threads that are not here, and
  // its references are the parent's. The memory is shared until written, so nothing is lost.
  auto* inherited = current.load(std::memory_order_relaxed);
  current.store(new Ledger(storage_ops(), inherited->scopes().next_serial()),
                std::memory_order_release);
}

// Leaked: leases are released while static objects are destroyed, and after the interpreter ended.
Ledger& first_ledger() {
  static auto* first = [] {
    auto* made = new Ledger(storage_ops());
    current.store(made, std::memory_order_release);
    on_fork_in_child(start_anew_in_child);
    return made;
  }();
  (void)first;
  return *current.load(std::memory_order_acquire);
}

template <class Id, class Key>
std::vector<std::pair<Id, Totals>> group(const Snapshot& snapshot, const std::vector<Key>& keys) {
  std::vector<std::tuple<Key, uint64_t, uint64_t>> rows;
  rows.reserve(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    rows.emplace_back(keys[i], snapshot.storage[i], snapshot.bytes[i]);
  }
  std::ranges::sort(rows);
  std::vector<std::pair<Id, Totals>> out;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& [key, storage, bytes] = rows[i];
    if (i == 0 || std::get<0>(rows[i - 1]) != key) {
      out.emplace_back(Id{key}, Totals());
    }
    auto& totals = out.back().second;
    totals.leases += 1;
    if (totals.leases == 1 || std::get<1>(rows[i - 1]) != storage) {
      totals.bytes += bytes;
    }
  }
  std::ranges::stable_sort(
      out, [](const auto& a, const auto& b) { return a.second.bytes > b.second.bytes; });
  return out;
}

}  // namespace

Ledger& ledger() {
  auto* found = current.load(std::memory_order_acquire);
  return found != nullptr ? *found : first_ledger();
}

Ledger::Ledger(LeaseTable::ObjectOps ops, uint64_t first_scope)
    : scopes_(first_scope), leases_(ops, scopes_) {}

KindTotals Ledger::totals() {
  sweep();
  return leases_.totals();
}

KindTotals Ledger::start_interval() {
  sweep();
  return leases_.start_interval();
}

Snapshot Ledger::snapshot() {
  sweep();
  const auto rows = leases_.rows();
  return columns_of(rows);
}

void Ledger::release_after(LeaseKey key, Fence fence) {
  sweep();
  if (fence.ready()) {
    leases_.release(key);
    return;
  }
  // Its scope is done with it; only the device is not.
  if (!leases_.move(key, ScopeId::process)) {
    return;
  }
  std::lock_guard lock(waiting_mutex_);
  waiting_.emplace_back(key, std::move(fence));
  waiting_count_.store(waiting_.size(), std::memory_order_relaxed);
}

void Ledger::sweep() {
  if (waiting_count_.load(std::memory_order_relaxed) == 0) {
    return;
  }
  std::vector<std::pair<LeaseKey, Fence>> done;
  {
    std::lock_guard lock(waiting_mutex_);
    auto ready = std::stable_partition(waiting_.begin(), waiting_.end(),
                                       [](const auto& entry) { return !entry.second.ready(); });
    std::move(ready, waiting_.end(), std::back_inserter(done));
    waiting_.erase(ready, waiting_.end());
    waiting_count_.store(waiting_.size(), std::memory_order_relaxed);
  }
  for (const auto& [key, fence] : done) {
    leases_.release(key);
  }
}

Snapshot columns_of(const std::vector<LeaseRow>& rows) {
  Snapshot out;
  out.when = coarse_nanoseconds();
  const auto fill = [&](auto& column, auto field) {
    column.reserve(rows.size());
    for (const auto& row : rows) {
      column.push_back(field(row));
    }
  };
  fill(out.storage, [](const LeaseRow& row) { return row.storage; });
  fill(out.bytes, [](const LeaseRow& row) { return row.bytes; });
  fill(out.scope, [](const LeaseRow& row) { return static_cast<uint64_t>(row.scope); });
  fill(out.taken, [](const LeaseRow& row) { return row.taken; });
  fill(out.owner, [](const LeaseRow& row) { return static_cast<uint32_t>(row.owner); });
  fill(out.device, [](const LeaseRow& row) { return row.device; });
  return out;
}

uint64_t Snapshot::bytes_once() const {
  const auto together = group<uint32_t>(*this, std::vector<uint32_t>(size(), 0));
  return together.empty() ? 0 : together.front().second.bytes;
}

std::vector<std::pair<OwnerId, Totals>> Snapshot::by_owner() const {
  return group<OwnerId>(*this, owner);
}

std::vector<std::pair<ScopeId, Totals>> Snapshot::by_scope() const {
  return group<ScopeId>(*this, scope);
}

}  // namespace tenure
