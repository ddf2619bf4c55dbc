#include <tenure/core/storage_ref.h>

#include <tenure/core/error.h>
#include <tenure/core/ledger.h>
#include <tenure/core/release.h>
#include <tenure/core/text.h>

#include <ATen/core/Tensor.h>

#include <atomic>

namespace tenure {
namespace {

std::atomic<bool> forgetting{false};

void retain_storage(void* object) {
  c10::raw::intrusive_ptr::incref(static_cast<c10::StorageImpl*>(object));
}

void drop_storage(void* object) {
  if (!forgetting.load(std::memory_order_relaxed)) {
    c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(object));
  }
}

// A released storage keeps its size, but not its data.
uint64_t bytes_of_storage(const void* object) {
  // The cast is for a getter that lacks a const version; nothing is written.
  auto* storage = static_cast<c10::StorageImpl*>(const_cast<void*>(object));
  return storage->_mutable_data_ptr_no_checks().get() == nullptr ? 0 : storage->nbytes();
}

// Why the tensor has no storage that could be named; null if it has one.
const char* why_no_storage(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "it is undefined (None)";
  }
  if (tensor.is_meta()) {
    return "it is on the meta device and has no data";
  }
  if (tensor.layout() == c10::Layout::Jagged) {
    return "it is nested and has several storages: use its offsets() and values()";
  }
  if (tensor.is_nested()) {
    return "it is nested and has several shapes: use its values()";
  }
  if (tensor.layout() != c10::Layout::Strided && tensor.layout() != c10::Layout::Mkldnn) {
    return "it is sparse and has several storages: use its indices() and values()";
  }
  if (tensor.is_quantized()) {
    return "it is quantized: use its int_repr()";
  }
  if (!tensor.has_storage()) {
    return "it has no storage of its own (a wrapper or an opaque layout): use the tensor inside it";
  }
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->sym_nbytes().is_heap_allocated()) {
    return "its size is symbolic: it is being traced and has no data";
  }
  const bool no_data = never_had_data(tensor.storage());
  if (tensor.key_set().has(c10::DispatchKey::Python) && (no_data || storage->device().is_meta())) {
    return "it is a tensor subclass without data of its own: use the tensor inside it";
  }
  if (no_data) {
    return "it has no data: it is being traced, or stands for a value that is not stored";
  }
  return nullptr;
}

}  // namespace

LeaseTable::ObjectOps storage_ops() { return {retain_storage, drop_storage, bytes_of_storage}; }

void forget_storages_from_now_on() { forgetting.store(true, std::memory_order_relaxed); }

const c10::Storage& storage_of(const at::Tensor& tensor, std::string_view verb) {
  if (const auto* why = why_no_storage(tensor)) {
    throw LeaseError(text("this tensor cannot be ", verb, ": ", why));
  }
  return tensor.storage();
}

StorageRef::StorageRef()
    : storage_(c10::intrusive_ptr<c10::StorageImpl>()), device_(c10::DeviceType::CPU) {}

StorageRef::StorageRef(const c10::Storage& storage)
    : storage_(storage.getWeakStorageImpl()), device_(storage.device()) {}

StorageRef::StorageRef(const at::Tensor& tensor)
    : StorageRef(storage_of(tensor, "identified by its storage")) {}

std::optional<c10::Storage> StorageRef::lock() const {
  auto strong = storage_.lock();
  return strong ? std::optional<c10::Storage>(std::move(strong)) : std::nullopt;
}

size_t StorageRef::nbytes() const {
  const auto storage = lock();
  return storage ? storage->nbytes() : 0;
}

std::string StorageRef::text() const {
  if (!alive()) {
    return tenure::text("storage ", address(), " (dead)");
  }
  return tenure::text("storage ", address(), " (", bytes_text(nbytes()), " on ", device_.str(),
                      ")");
}

uint16_t device_tag(c10::Device device) {
  return static_cast<uint16_t>((static_cast<uint8_t>(device.type()) << 8) |
                               static_cast<uint8_t>(device.index()));
}

c10::Device device_from_tag(uint16_t tag) {
  return {static_cast<c10::DeviceType>(tag >> 8), static_cast<c10::DeviceIndex>(tag & 0xff)};
}

}  // namespace tenure
