// Lease: the only way Tenure keeps a storage alive past a call. Move-only, releases itself.
//
// A Lease object belongs to one thread at a time, like a unique_ptr, but it may be moved to and
// released by any thread. Releasing is safe at interpreter exit and in a forked child, where a
// lease that was inherited is forgotten: it is the parent's. A scope that closes with
// OnClose::release ends the leases in it; their Lease objects then hold nothing.
#pragma once

#include <tenure/core/fence.h>
#include <tenure/core/lease_table.h>
#include <tenure/core/owner.h>
#include <tenure/core/scope_tree.h>

#include <optional>

namespace c10 {
struct Storage;
}  // namespace c10

namespace tenure {

class Lease {
 public:
  Lease() = default;
  // Takes over one reference to `object`, which ledger() knows how to drop. To lease a tensor's
  // storage call hold().
  Lease(void* object, uint64_t bytes, uint16_t device, OwnerId owner, ScopeId scope);
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { release(); }

  // Whether this object still keeps its storage alive.
  bool held() const { return row().has_value(); }

  // Now. True if this call ended the lease. The storage's memory may be freed inside the call, and
  // whatever its deleter runs runs here.
  bool release() noexcept;
  // When the fence is ready. This object holds nothing any more, the ledger does.
  void release(Fence fence);
  // Throws LeaseError if it is no longer held, ScopeError if the scope is not open.
  void transfer(ScopeId scope);

  // The storage, as a reference of the caller's own. Throws LeaseError if no longer held.
  c10::Storage storage() const;

  // Owner, scope, bytes, since when; nothing once it is no longer held.
  std::optional<LeaseRow> row() const;
  // Whether it is of the process that this one was forked from, whose lease it remains.
  bool inherited() const;

 private:
  LeaseKey take_key();

  LeaseKey key_;
  uint32_t process_ = 0;
};

}  // namespace tenure
