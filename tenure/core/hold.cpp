#include <tenure/core/hold.h>

#include <tenure/core/error.h>
#include <tenure/core/ledger.h>
#include <tenure/core/scope.h>
#include <tenure/core/storage_ref.h>

#include <ATen/core/Tensor.h>

namespace tenure {

Lease hold(const c10::Storage& storage, OwnerId owner, ScopeId scope) {
  auto* object = storage.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(object);
  return {object, storage.nbytes(), device_tag(storage.device()), owner, scope};
}

Lease hold(const at::Tensor& tensor, OwnerId owner, ScopeId scope) {
  return hold(storage_of(tensor, "leased"), owner, scope);
}

Lease hold(const at::Tensor& tensor, OwnerId owner) {
  return hold(storage_of(tensor, "leased"), owner, current_scope());
}

c10::Storage Lease::storage() const {
  auto* object = key_.generation == 0 || inherited() ? nullptr : ledger().leases().share(key_);
  if (object == nullptr) {
    throw LeaseError("this lease was released and holds no storage: hold the tensor again");
  }
  return c10::Storage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(object)));
}

}  // namespace tenure
