#include <tenure/core/release.h>

#include <tenure/core/error.h>
#include <tenure/core/events.h>
#include <tenure/core/fork.h>
#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>
#include <tenure/core/names.h>
#include <tenure/core/scope.h>
#include <tenure/core/storage_ref.h>
#include <tenure/core/text.h>
#include <tenure/core/ticks.h>
#include <tenure/core/torch_compat.h>

#include <ATen/MapAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace tenure {
namespace {

struct Released {
  StorageRef storage;  // keeps the key from being reused
  std::string text;
};

struct ReleasedTable {
  std::mutex mutex;
  std::unordered_map<const void*, Released> records;
  size_t sweep_at = 64;
  // Lets the common question, asked where nothing was ever released, cost one load.
  std::atomic<size_t> count{0};

  ReleasedTable() { protect_across_fork(mutex); }

  // REQUIRES: mutex.
  void add(const StorageRef& storage, std::string text) {
    if (records.size() >= sweep_at) {
      std::erase_if(records, [](const auto& entry) { return !entry.second.storage.alive(); });
      sweep_at = std::max<size_t>(64, records.size() * 2);
    }
    records.insert_or_assign(storage.address(), Released{storage, std::move(text)});
    count.store(records.size(), std::memory_order_release);
  }
};

ReleasedTable& released_table() {
  static auto* instance = new ReleasedTable;
  return *instance;
}

// Whether the memory was made by one of torch's map allocators. The one that a manager process
// looks after hides its deleter in a library of its own; to ask in which one a function is takes a
// walk through its symbols, 90 us in torch's, so what an allocator of torch's may resize is not
// asked.
bool mapped(const c10::StorageImpl& storage, const c10::DataPtr& data) {
  if (at::MapAllocator::fromDataPtr(data) != nullptr ||
      at::RefcountedMapAllocator::fromDataPtr(data) != nullptr) {
    return true;
  }
  if (storage.allocator() != nullptr && storage.resizable()) {
    return false;
  }
  Dl_info info{};
  auto* deleter = reinterpret_cast<void*>(data.get_deleter());
  return deleter != nullptr && dladdr(deleter, &info) != 0 && info.dli_fname != nullptr &&
         std::string_view(info.dli_fname).find("libshm") != std::string_view::npos;
}

// Why the storage's memory is not its own to free; empty if it is.
std::string why_not_releasable(c10::StorageImpl& storage) {
  const auto& data = storage._mutable_data_ptr_no_checks();  // another thread may release it now
  if (c10::impl::cow::is_cow_data_ptr(data)) {
    return "it is copy-on-write and another tensor may share its data: clone() it first";
  }
  if (mapped(storage, data)) {
    return "its memory is shared with other processes or mapped from a file: clone() it first";
  }
  if (storage.allocator() == nullptr) {
    return "its memory belongs to someone outside PyTorch (numpy, DLPack, from_blob, "
           "torch.load, another process): clone() it first";
  }
  if (!storage.resizable()) {
    return "PyTorch marks it as not resizable (numpy() and pin_memory() do, because others rely on "
           "its address): clone() it first";
  }
  return {};
}

std::string release_text(const StorageRef& ref, c10::StorageImpl& storage, const Releaser& by) {
  auto& book = ledger();
  const auto leases = book.leases().rows_of(&storage);
  auto who = std::string("of no owner known to Tenure");
  if (!leases.empty()) {
    who = text("owned by ", owner_text(leases.back().owner));
  }
  const auto where = by.site.empty() ? std::string() : text(" at ", fitting(by.site));
  return text("UseAfterRelease: ", ref.text(), ", ", who, ", was released by '", by.name, "'",
              where, " in scope '", book.scopes().path(current_scope()),
              "': refill it before this read, or release it after its last reader");
}

void record(EventType type, const c10::StorageImpl& storage, uint64_t bytes) {
  if (events_on()) {
    append({.ticks = ticks(),
            .bytes = bytes,
            .scope = static_cast<uint64_t>(current_scope()),
            .type = type,
            .device = device_tag(storage.device()),
            .value = reinterpret_cast<uintptr_t>(&storage)});
  }
}

// Lets memory go when the device is done with it, under the ledger's eyes until then.
void free_after(c10::DataPtr data, size_t bytes, c10::Allocator* allocator, const Releaser& by,
                const Fence& fence) {
  if (fence.ready()) {
    return;
  }
  const auto device = data.device();
  auto rest = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                    std::move(data), allocator, true);
  const auto owner = intern_owner(OwnerKind::workspace, by.name, by.site);
  Lease(rest.release(), bytes, device_tag(device), owner, ScopeId::process).release(fence);
}

// The whole storage as a tensor of bytes with a version counter of its own.
at::Tensor bytes_of(const c10::Storage& storage, int64_t offset, int64_t bytes) {
  auto view = at::empty({0}, at::TensorOptions(at::kByte).device(storage.device()));
  view.set_(storage, offset, {bytes}, {1});
  return view;
}

// What we copy is no op of the user's program: dispatch modes and transforms do not see it.
constexpr c10::DispatchKeySet kModes{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                     c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                     c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                     c10::DispatchKey::Functionalize};

// Whether the tensor's elements are all that its storage has, each once: then there is no doubt
// where each value of a content of the same shape belongs.
bool covers_its_storage(const at::Tensor& tensor) {
  return tensor.storage_offset() == 0 && tensor.nbytes() == tensor.storage().nbytes() &&
         tensor.is_non_overlapping_and_dense();
}

// As `tensor`, but on other memory and with the content's dtype, whose elements are as large: bits
// are copied, not converted.
at::Tensor same_strides_on(const c10::Storage& memory, const at::Tensor& tensor,
                           const at::Tensor& content) {
  auto out = at::empty({0}, content.options().device(memory.device()));
  out.set_(memory, 0, tensor.sizes(), tensor.strides());
  if (content.scalar_type() == tensor.scalar_type()) {
    out._set_conj(tensor.is_conj());
    out._set_neg(tensor.is_neg());
  }
  return out;
}

// REQUIRES: `memory` has as many bytes as the content.
void copy_content(const c10::Storage& memory, const at::Tensor& tensor, const at::Tensor& content) {
  const auto source = content.detach();
  if (source.sizes() == tensor.sizes() && covers_its_storage(tensor)) {
    same_strides_on(memory, tensor, source).copy_(source);
    return;
  }
  const auto ordered = source.resolve_conj().resolve_neg().contiguous();
  const auto bytes = static_cast<int64_t>(ordered.nbytes());
  const auto offset = ordered.storage_offset() * static_cast<int64_t>(ordered.element_size());
  bytes_of(memory, 0, bytes).copy_(bytes_of(ordered.storage(), offset, bytes));
}

// New memory for the tensor's storage, with `content` in it, if that is given.
c10::DataPtr new_data(const at::Tensor& tensor, const at::Tensor* content) {
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  const c10::DeviceGuard guard(storage.device());
  auto data = storage.allocator()->allocate(storage.nbytes());
  if (content == nullptr || storage.nbytes() == 0) {
    return data;
  }
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(kModes);
  c10::Storage fresh(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data));
  copy_content(fresh, tensor, *content);
  return fresh.set_data_ptr(c10::DataPtr(nullptr, storage.device()));
}

void refill(const at::Tensor& tensor, const at::Tensor* content) {
  const auto& storage = storage_of(tensor, "refilled");
  auto& impl = *storage.unsafeGetStorageImpl();
  const StorageRef ref(storage);
  if (!is_released(storage)) {
    throw ReleaseError(text(ref.text(),
                            " was not released and cannot be refilled: release it first, "
                            "or write to it with copy_()"));
  }
  if (content != nullptr) {
    require_data(storage_of(*content, "used to refill a storage"));
    if (content->device() != storage.device()) {
      throw ReleaseError(text(ref.text(), " cannot be refilled from ", content->device().str(),
                              ": move the content to ", storage.device().str(), " first"));
    }
    if (content->nbytes() != impl.nbytes()) {
      throw ReleaseError(text(ref.text(), " cannot be refilled from ", content->nbytes(),
                              " bytes: it has ", impl.nbytes(),
                              ", and the content must cover all of it"));
    }
  }
  auto data = new_data(tensor, content);
  {
    auto& released = released_table();
    std::lock_guard lock(released.mutex);
    if (released.records.erase(&impl) == 0) {
      throw ReleaseError(text(ref.text(), " was refilled by another thread at the same time"));
    }
    released.count.store(released.records.size(), std::memory_order_release);
    compat::give_data(impl, std::move(data));
  }
  ledger().leases().set_bytes(&impl, impl.nbytes());
  record(EventType::storage_refilled, impl, impl.nbytes());
}

}  // namespace

void release_storage(const at::Tensor& tensor, const Releaser& by, const Fence& fence) {
  check_name(by.name, "name of the releaser");
  const auto& storage = storage_of(tensor, "released");
  auto& impl = *storage.unsafeGetStorageImpl();
  const StorageRef ref(storage);
  if (const auto before = released_text(storage)) {
    throw UseAfterRelease(text(*before, ". It cannot be released a second time"));
  }
  if (const auto why = why_not_releasable(impl); !why.empty()) {
    throw ReleaseError(text(ref.text(), " cannot be released: ", why));
  }
  auto why = release_text(ref, impl, by);
  c10::DataPtr old;
  {
    auto& released = released_table();
    std::lock_guard lock(released.mutex);
    if (released.records.contains(&impl)) {
      throw UseAfterRelease(text(ref.text(), " was released by another thread at the same time"));
    }
    released.add(ref, why);
    old = impl.set_data_ptr(c10::DataPtr(nullptr, impl.device()));
    compat::make_access_raise(impl, std::move(why));
  }
  const auto bytes = impl.nbytes();
  ledger().leases().set_bytes(&impl, 0);
  record(EventType::storage_released, impl, bytes);
  free_after(std::move(old), bytes, impl.allocator(), by, fence);
}

void refill_storage(const at::Tensor& tensor) { refill(tensor, nullptr); }

void refill_storage(const at::Tensor& tensor, const at::Tensor& content) {
  refill(tensor, &content);
}

std::optional<std::string> released_text(const c10::Storage& storage) {
  auto& released = released_table();
  if (released.count.load(std::memory_order_acquire) == 0) {
    return std::nullopt;
  }
  std::lock_guard lock(released.mutex);
  // While a record exists its StorageRef keeps the address from being another storage's.
  const auto found = released.records.find(storage.unsafeGetStorageImpl());
  return found == released.records.end() ? std::nullopt : std::optional(found->second.text);
}

bool is_released(const c10::Storage& storage) {
  auto& released = released_table();
  if (released.count.load(std::memory_order_acquire) == 0) {
    return false;
  }
  std::lock_guard lock(released.mutex);
  return released.records.contains(storage.unsafeGetStorageImpl());
}

bool never_had_data(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  if (impl->_mutable_data_ptr_no_checks().get() != nullptr || impl->nbytes() == 0) {
    return false;
  }
  auto& released = released_table();
  std::lock_guard lock(released.mutex);  // under which data and record change together
  return impl->_mutable_data_ptr_no_checks().get() == nullptr && !released.records.contains(impl);
}

void require_data(const c10::Storage& storage) {
  if (const auto why = released_text(storage)) {
    throw UseAfterRelease(*why);
  }
}

}  // namespace tenure
