#include <tenure/core/lease.h>

#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/ledger.h>
#include <tenure/core/text.h>

#include <utility>

namespace tenure {

Lease::Lease(void* object, uint64_t bytes, uint16_t device, OwnerId owner, ScopeId scope)
    : key_(ledger().leases().take(object, bytes, device, owner, scope)),
      process_(fork_generation()) {}

Lease::Lease(Lease&& other) noexcept : key_(other.take_key()), process_(other.process_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    key_ = other.take_key();
    process_ = other.process_;
  }
  return *this;
}

LeaseKey Lease::take_key() { return std::exchange(key_, LeaseKey()); }

bool Lease::inherited() const { return process_ != fork_generation(); }

bool Lease::release() noexcept {
  const auto key = take_key();
  return key.generation != 0 && !inherited() && ledger().leases().release(key);
}

void Lease::release(Fence fence) {
  if (key_.generation != 0 && !inherited()) {
    ledger().release_after(key_, std::move(fence));  // where that throws, this still holds it
  }
  take_key();
}

void Lease::transfer(ScopeId scope) {
  auto& book = ledger();
  if (!book.scopes().is_open(scope)) {
    throw ScopeError(
        "a lease cannot be transferred to a scope that is not open: transfer it while "
        "the scope is, or to the process scope");
  }
  if (inherited()) {
    throw LeaseError("this lease is the parent process's: hold the tensor again in this one");
  }
  if (key_.generation == 0 || !book.leases().move(key_, scope)) {
    throw LeaseError("this lease was released and cannot be transferred: hold the tensor again");
  }
}

std::optional<LeaseRow> Lease::row() const {
  if (key_.generation == 0 || inherited()) {
    return std::nullopt;
  }
  return ledger().leases().row(key_);
}

}  // namespace tenure
