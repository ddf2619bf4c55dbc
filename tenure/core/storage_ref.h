// StorageRef: the identity of a storage, without keeping its data alive.
//
// Note [Identity is a weak reference]
// An address is not an identity: allocators hand out the same one again, for the data and for the
// StorageImpl itself. A StorageRef holds a weak reference, and while any weak reference exists the
// StorageImpl's own memory (about 100 bytes) cannot be reused, so equal address means the same
// storage, alive or dead. The data is freed with the last strong reference all the same.
//
// A value: copy, hash and compare it, from any thread.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace at {
class Tensor;
}  // namespace at

namespace tenure {

class StorageRef {
 public:
  // Of no storage: equal to itself alone, never alive.
  StorageRef();
  explicit StorageRef(const c10::Storage& storage);
  // Throws LeaseError for a tensor without a storage of its own, saying why.
  explicit StorageRef(const at::Tensor& tensor);

  bool alive() const { return storage_.use_count() > 0; }
  // The storage, or nothing once it is dead.
  std::optional<c10::Storage> lock() const;
  // 0 once it is dead.
  size_t nbytes() const;
  c10::Device device() const { return device_; }

  bool operator==(const StorageRef& other) const { return address() == other.address(); }
  size_t hash() const { return std::hash<const void*>()(address()); }
  // Distinguishes this storage from all others for as long as a StorageRef to it exists.
  const void* address() const { return storage_._unsafe_get_target(); }

  // "storage 0x7f12… (4.0 KiB on cpu)"
  std::string text() const;

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  c10::Device device_;
};

// The tensor's storage. Throws LeaseError for one that has none of its own (undefined, meta,
// sparse, quantized, wrapper subclass…), saying that it cannot be `verb`.
const c10::Storage& storage_of(const at::Tensor& tensor, std::string_view verb);

// A device in 16 bits, as leases and events carry it.
uint16_t device_tag(c10::Device device);
c10::Device device_from_tag(uint16_t tag);

// From now on the ledger forgets storages instead of dropping them. For the end of a process, when
// what a storage's deleter needs (an interpreter) is gone.
void forget_storages_from_now_on();

}  // namespace tenure

template <>
struct std::hash<tenure::StorageRef> {
  size_t operator()(const tenure::StorageRef& ref) const { return ref.hash(); }
};
