// HostCount of meter.h: a wrapper around torch's CPU allocator.
#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/meter.h>

#include <c10/core/CPUAllocator.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace tenure {
namespace {

std::atomic<int64_t> g_counted = 0;
std::atomic<int> g_counting = 0;

// Sizes by address, in shards, so that threads seldom meet.
class Sizes {
 public:
  Sizes() {
    for (auto& shard : shards_) {
      protect_across_fork(shard.mutex);
    }
  }
  void born(const void* data, size_t bytes) {
    if (bytes == 0) {
      return;
    }
    auto& shard = of(data);
    const std::lock_guard lock(shard.mutex);
    shard.bytes[data] = bytes;
  }
  // Zero if it was not counted.
  size_t died(const void* data) {
    auto& shard = of(data);
    const std::lock_guard lock(shard.mutex);
    const auto found = shard.bytes.find(data);
    if (found == shard.bytes.end()) {
      return 0;
    }
    const auto bytes = found->second;
    shard.bytes.erase(found);
    return bytes;
  }

 private:
  struct Shard {
    std::mutex mutex;
    std::unordered_map<const void*, size_t> bytes;
  };
  Shard& of(const void* data) {
    return shards_[reinterpret_cast<uintptr_t>(data) / 64 % shards_.size()];
  }
  std::array<Shard, 16> shards_;
};

Sizes& sizes() {
  static auto* instance = new Sizes;
  return *instance;
}

// Hands out what the allocator beneath it made, with our deleter in place of that one's: nothing is
// added to a block. Once installed it stays, for others may have wrapped it; where nobody counts it
// costs a load for each birth and death. Never destroyed.
class Counted final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto made = inner_->allocate(bytes);
    // Whoever wraps this one in turn goes by raw_deleter(), so every block has that one.
    if (made.get() != nullptr && made.get() == made.get_context() &&
        made.compare_exchange_deleter(inner_deleter_, &Counted::free) &&
        g_counting.load(std::memory_order_relaxed) > 0) {
      sizes().born(made.get(), bytes);
      g_counted.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
      device_allocated(c10::Device(c10::DeviceType::CPU), static_cast<int64_t>(bytes));
    }
    return made;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Counted::free; }
  void copy_data(void* dest, const void* src, size_t bytes) const override {
    inner_->copy_data(dest, src, bytes);
  }

  void install() {
    inner_ = c10::GetCPUAllocator();
    inner_deleter_ = inner_->raw_deleter();
    if (inner_deleter_ == nullptr) {
      throw Error(
          "torch's CPU allocator was replaced by one that gives out more than plain memory, so CPU "
          "tensors cannot be counted");
    }
    constexpr uint8_t priority = 255;  // it only ever rises
    c10::SetCPUAllocator(this, priority);
    allocations_are_told(c10::DeviceType::CPU);
  }

 private:
  static void free(void* data) {
    if (g_counted.load(std::memory_order_relaxed) == 0) {
      inner_deleter_(data);
      return;
    }
    if (const auto bytes = static_cast<int64_t>(sizes().died(data)); bytes > 0) {
      g_counted.fetch_sub(bytes, std::memory_order_relaxed);
      device_allocated(c10::Device(c10::DeviceType::CPU), -bytes);
    }
    inner_deleter_(data);
  }

  c10::Allocator* inner_ = nullptr;
  static inline c10::DeleterFnPtr inner_deleter_ = nullptr;
};

Counted& counted() {
  static auto* instance = new Counted;
  return *instance;
}

}  // namespace

HostCount::HostCount() {
  static std::once_flag once;
  std::call_once(once, [] { counted().install(); });
  g_counting.fetch_add(1);
}

HostCount::~HostCount() { g_counting.fetch_sub(1); }

int64_t host_counted() { return g_counted.load(std::memory_order_relaxed); }

}  // namespace tenure
