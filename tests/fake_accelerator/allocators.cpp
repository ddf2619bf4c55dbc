#include "allocators.h"

#include "current.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <atomic>

namespace fake_accelerator {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

namespace {

constexpr auto kSum = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

void reset_all(Pool::Stats& stats, void (Stat::*reset)()) {
  for (StatArray* array : {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split,
                           &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                           &stats.inactive_split_bytes, &stats.requested_bytes}) {
    for (Stat& stat : *array) {
      (stat.*reset)();
    }
  }
}

struct Totals {
  explicit Totals(const Pool::Stats& stats)
      : allocated(stats.allocated_bytes[kSum].current),
        reserved(stats.reserved_bytes[kSum].current) {}
  int64_t allocated;
  int64_t reserved;
};

std::atomic<AllocationListener> g_listener = nullptr;

// Under the lock, as CUDA's allocator does: what one thread frees before another allocates is told
// in that order.
void tell(c10::DeviceIndex device, int64_t bytes) {
  if (auto* listener = g_listener.load()) {
    listener(device, bytes);
  }
}

// For whoever watches allocations through c10::MemoryReportingInfoBase: torch's profiler, Tenure.
// Called without the lock, because they may allocate.
void report(void* data, int64_t bytes, Totals totals, c10::Device device) {
  c10::reportMemoryUsageToProfiler(data, bytes, totals.allocated, totals.reserved, device);
}

}  // namespace

void tell_allocations(AllocationListener listener) { g_listener = listener; }

Memory& Memory::get() {
  static Memory* memory = new Memory;  // leaked, as Lanes are
  return *memory;
}

Pool& Memory::device_pool(c10::DeviceIndex device) {
  check_device(device);
  return devices_[device];
}

c10::DataPtr Memory::allocate_device(size_t bytes) {
  const c10::Device device(kDeviceType, current_device());
  void* data = nullptr;
  if (bytes > 0) {
    std::unique_lock lock(mutex_);
    Pool& pool = device_pool(device.index());
    data = pool.allocate(bytes, current_stream(device.index()), policy_.device_bytes);
    const Totals totals(pool.stats());
    const auto limit = policy_.device_bytes;
    if (data != nullptr) {
      tell(device.index(), static_cast<int64_t>(bytes));
    }
    lock.unlock();
    TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr,
                     "fake accelerator out of memory: tried to allocate ", bytes, " bytes on ",
                     device, ", where ", totals.reserved, " of ", limit, " are taken");
    report(data, static_cast<int64_t>(bytes), totals, device);
  }
  return {data, data, &free_device, device};
}

c10::DataPtr Memory::allocate_pinned(size_t bytes) {
  std::lock_guard lock(mutex_);
  void* data = bytes > 0 ? pinned_.allocate(bytes, std::nullopt, std::nullopt) : nullptr;
  return {data, data, &free_pinned, c10::Device(c10::kCPU)};
}

void Memory::free_device(void* data) {
  if (data == nullptr) {
    return;
  }
  Memory& memory = get();
  std::unique_lock lock(memory.mutex_);
  for (c10::DeviceIndex device = 0; device < kDeviceCount; ++device) {
    Pool& pool = memory.devices_[device];
    if (!pool.holds(data)) {
      continue;
    }
    const auto bytes = static_cast<int64_t>(pool.free(data));
    const Totals totals(pool.stats());
    tell(device, -bytes);
    lock.unlock();
    report(data, -bytes, totals, c10::Device(kDeviceType, device));
    return;
  }
  TORCH_INTERNAL_ASSERT(false, "freed ", data, ", which is not fake device memory");
}

void Memory::free_pinned(void* data) {
  if (data == nullptr) {
    return;
  }
  Memory& memory = get();
  std::lock_guard lock(memory.mutex_);
  TORCH_INTERNAL_ASSERT(memory.pinned_.holds(data), "freed ", data, ", which is not pinned memory");
  memory.pinned_.free(data);
}

void Memory::use_on(const void* data, c10::Stream stream) {
  std::lock_guard lock(mutex_);
  for (Pool& pool : devices_) {
    pool.use_on(data, stream);
  }
  pinned_.use_on(data, stream);
}

bool Memory::is_pinned(const void* address) {
  std::lock_guard lock(mutex_);
  return pinned_.contains(address);
}

std::optional<c10::DeviceIndex> Memory::device_of(const void* address) {
  std::lock_guard lock(mutex_);
  for (c10::DeviceIndex device = 0; device < kDeviceCount; ++device) {
    if (devices_[device].contains(address)) {
      return device;
    }
  }
  return std::nullopt;
}

void Memory::trim_devices() {
  std::lock_guard lock(mutex_);
  for (Pool& pool : devices_) {
    pool.trim();
  }
}

void Memory::trim_pinned() {
  std::lock_guard lock(mutex_);
  pinned_.trim();
}

Pool::Stats Memory::device_stats(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  return device_pool(device).stats();
}

Pool::Stats Memory::pinned_stats() {
  std::lock_guard lock(mutex_);
  return pinned_.stats();
}

void Memory::reset_device_stats(c10::DeviceIndex device, void (Stat::*reset)()) {
  std::lock_guard lock(mutex_);
  reset_all(device_pool(device).stats(), reset);
}

void Memory::reset_pinned_stats(void (Stat::*reset)()) {
  std::lock_guard lock(mutex_);
  reset_all(pinned_.stats(), reset);
}

void Memory::set_policy(MemoryPolicy policy) {
  std::lock_guard lock(mutex_);
  policy_ = policy;
  if (policy.reuse_freed) {
    return;
  }
  for (Pool& pool : devices_) {
    pool.trim();
  }
  pinned_.trim();
}

MemoryPolicy Memory::policy() {
  std::lock_guard lock(mutex_);
  return policy_;
}

// --- as torch sees it ------------------------------------------------------------------------

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return Memory::get().allocate_device(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &Memory::free_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override { Memory::get().trim_devices(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Memory::get().use_on(data.get(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return Memory::get().device_stats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Memory::get().reset_device_stats(device, &Stat::reset_accumulated);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Memory::get().reset_device_stats(device, &Stat::reset_peak);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const size_t total = Memory::get().policy().device_bytes;
    const auto used =
        static_cast<size_t>(Memory::get().device_stats(device).reserved_bytes[kSum].current);
    return {total - std::min(used, total), total};
  }
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return Memory::get().allocate_pinned(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &Memory::free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool record_event(void* data, void* /*context*/, c10::Stream stream) override {
    Memory::get().use_on(data, stream);
    return true;
  }
  void empty_cache() override { Memory::get().trim_pinned(); }
  at::HostStats get_stats() override {
    const auto stats = Memory::get().pinned_stats();
    at::HostStats host;
    host.active_requests = stats.active[kSum];
    host.active_bytes = stats.active_bytes[kSum];
    host.allocations = stats.segment[kSum];
    host.allocated_bytes = stats.reserved_bytes[kSum];
    host.num_host_alloc = stats.num_device_alloc;
    host.num_host_free = stats.num_device_free;
    return host;
  }
  void reset_accumulated_stats() override {
    Memory::get().reset_pinned_stats(&Stat::reset_accumulated);
  }
  void reset_peak_stats() override { Memory::get().reset_pinned_stats(&Stat::reset_peak); }
};

void register_allocators() {
  // Leaked: torch keeps the pointers for the life of the process.
  c10::SetAllocator(kDeviceType, new DeviceAllocator);
  at::setHostAllocator(kDeviceType, new PinnedAllocator);
}

}  // namespace fake_accelerator
