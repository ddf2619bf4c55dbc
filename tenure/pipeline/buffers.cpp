#include <tenure/pipeline/buffers.h>

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <map>
#include <mutex>
#include <utility>

namespace tenure::pipeline {

struct Buffers::Pool {
  using Kind = std::pair<c10::Device, size_t>;  // and bytes
  struct Before {
    bool operator()(const Kind& a, const Kind& b) const {
      return std::tuple(a.first.type(), a.first.index(), a.second) <
             std::tuple(b.first.type(), b.first.index(), b.second);
    }
  };

  std::mutex mutex;
  std::multimap<Kind, c10::DataPtr, Before> free;
  int64_t held = 0;
  int64_t most_held = 0;
  bool keeps = false;  // what comes back
};

namespace {

// What a storage holds in place of the memory itself.
struct Lent {
  std::shared_ptr<Buffers::Pool> pool;
  c10::DataPtr memory;
  size_t bytes = 0;
};

}  // namespace

Buffers::Buffers() : pool_(std::make_shared<Pool>()) {}

Buffers::~Buffers() { trim(); }

void Buffers::trim() {
  std::multimap<Pool::Kind, c10::DataPtr, Pool::Before> gone;  // dropped without the lock
  const std::lock_guard lock(pool_->mutex);
  gone.swap(pool_->free);
  pool_->keeps = false;
  for (const auto& [kind, memory] : gone) {
    pool_->held -= static_cast<int64_t>(kind.second);
  }
  pool_->most_held = pool_->held;
}

int64_t Buffers::held() const {
  const std::lock_guard lock(pool_->mutex);
  return pool_->held;
}

int64_t Buffers::most_held() const {
  const std::lock_guard lock(pool_->mutex);
  return pool_->most_held;
}

at::Tensor Buffers::make(const Spec& spec, c10::Device device, size_t front) {
  if (spec.type == c10::ScalarType::Undefined) {
    return {};
  }
  const auto options = at::TensorOptions(spec.type).device(device);
  if (spec.bytes() == 0) {
    return at::empty(spec.sizes, options);
  }
  const auto bytes = spec.bytes() + front;
  const c10::DeviceGuard guard(device);
  auto* allocator = c10::GetAllocator(device.type());
  auto lent = std::make_unique<Lent>(Lent{.pool = pool_, .memory = {}, .bytes = bytes});
  {
    const std::lock_guard lock(pool_->mutex);
    pool_->keeps = true;
    if (auto found = pool_->free.find({device, bytes}); found != pool_->free.end()) {
      lent->memory = std::move(found->second);
      pool_->free.erase(found);
    }
  }
  if (lent->memory.get() == nullptr) {
    lent->memory = allocator->allocate(bytes);
    const std::lock_guard lock(pool_->mutex);
    pool_->held += static_cast<int64_t>(bytes);
    pool_->most_held = std::max(pool_->most_held, pool_->held);
  }
  auto* data = lent->memory.get();
  const auto give_back = [](void* context) {
    const std::unique_ptr<Lent> back(static_cast<Lent*>(context));
    auto& pool = *back->pool;
    const std::lock_guard lock(pool.mutex);
    if (!pool.keeps) {
      pool.held -= static_cast<int64_t>(back->bytes);
      return;
    }
    const Pool::Kind kind{back->memory.device(), back->bytes};
    pool.free.emplace(kind, std::move(back->memory));
  };
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes,
      c10::DataPtr(data, lent.release(), give_back, device), allocator, /*resizable=*/true);
  auto out = at::empty({0}, options);
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(std::move(storage)));
  impl->set_storage_offset(static_cast<int64_t>(front / c10::elementSize(spec.type)));
  impl->set_sizes_contiguous(spec.sizes);
  return out;
}

}  // namespace tenure::pipeline
