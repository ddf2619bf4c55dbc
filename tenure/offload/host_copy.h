// HostCopy: the bytes of a storage at rest on the host, in pieces of a HostPool, each leased under
// the owner of the storage. When it goes, the memory returns to the pool.
//
// Belongs to one thread at a time.
#pragma once

#include <tenure/core/lease.h>
#include <tenure/offload/host_pool.h>

#include <c10/core/Storage.h>

#include <memory>
#include <vector>

namespace tenure::offload {

class HostCopy {
 public:
  HostCopy() = default;
  // Room for `bytes`, with whatever is in it. Throws BudgetError as HostPool::take does.
  HostCopy(const std::shared_ptr<HostPool>& pool, size_t bytes, OwnerId owner, ScopeId scope,
           HostPool::Limit limit = HostPool::Limit::kept);
  HostCopy(HostCopy&&) noexcept = default;
  HostCopy& operator=(HostCopy&&) noexcept = default;

  explicit operator bool() const { return !parts_.empty(); }
  size_t bytes() const { return bytes_; }

  // Calls `each(storage, busy)` for every piece in order: its memory, and what to wait for before
  // the first write. Throws LeaseError if a scope that closed has released the copy.
  template <class Each>
  void for_each_piece(Each each) const {
    for (const auto& part : parts_) {
      each(part.lease.storage(), part.room->piece.busy);
    }
  }

  // The memory must not be written to again before these are ready.
  void written_until(const Fence& fence);
  void read_until(const Fence& fence);

 private:
  // What a piece's storage frees when it dies.
  struct Room {
    std::shared_ptr<HostPool> pool;  // shared: a copy may outlive the session it was made in
    HostPool::Piece piece;
  };
  struct Part {
    std::shared_ptr<Room> room;  // shared with the storage's deleter
    Lease lease;
  };
  static void free_room(void* room);

  size_t bytes_ = 0;
  std::vector<Part> parts_;
};

}  // namespace tenure::offload
