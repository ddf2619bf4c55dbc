// HostCount and OwnCount of meter.h: a wrapper around torch's CPU allocator.
#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/meter.h>

#include <c10/core/CPUAllocator.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <utility>

namespace tenure {

struct OwnCount::Tally {
  std::atomic<int64_t> current = 0;
  std::atomic<int64_t> peak = 0;

  void add(int64_t bytes) {
    const auto now = current.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    auto seen = peak.load(std::memory_order_relaxed);
    while (seen < now && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
    }
  }
};

namespace {

// What this thread is in.
thread_local const std::shared_ptr<OwnCount::Tally>* t_here = nullptr;

std::atomic<int64_t> g_counted = 0;
std::atomic<int> g_counting = 0;

struct Block {
  size_t bytes = 0;
  std::shared_ptr<OwnCount::Tally> own;
};

// Blocks by address, in shards, so that threads seldom meet.
class Blocks {
 public:
  Blocks() {
    for (auto& shard : shards_) {
      protect_across_fork(shard.mutex);
    }
  }
  void born(const void* data, Block block) {
    if (block.bytes == 0) {
      return;
    }
    auto& shard = of(data);
    const std::lock_guard lock(shard.mutex);
    shard.blocks[data] = std::move(block);
  }
  // Of no bytes if it was not counted.
  Block died(const void* data) {
    auto& shard = of(data);
    const std::lock_guard lock(shard.mutex);
    const auto found = shard.blocks.find(data);
    if (found == shard.blocks.end()) {
      return {};
    }
    auto block = std::move(found->second);
    shard.blocks.erase(found);
    return block;
  }

 private:
  struct Shard {
    std::mutex mutex;
    ska::flat_hash_map<const void*, Block> blocks;  // no node to allocate for each birth
  };
  Shard& of(const void* data) {
    return shards_[reinterpret_cast<uintptr_t>(data) / 64 % shards_.size()];
  }
  std::array<Shard, 16> shards_;
};

Blocks& blocks() {
  static auto* instance = new Blocks;
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
      Block block{.bytes = bytes, .own = t_here != nullptr ? *t_here : nullptr};
      if (block.own != nullptr) {
        block.own->add(static_cast<int64_t>(bytes));
      }
      blocks().born(made.get(), std::move(block));
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
    const auto block = blocks().died(data);
    if (const auto bytes = static_cast<int64_t>(block.bytes); bytes > 0) {
      if (block.own != nullptr) {
        block.own->add(-bytes);
      }
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

OwnCount::OwnCount() : tally_(std::make_shared<Tally>()) {}

OwnCount::~OwnCount() = default;

Meter::Reading OwnCount::read() {
  const auto current = tally_->current.load(std::memory_order_relaxed);
  const auto peak = tally_->peak.exchange(current, std::memory_order_relaxed);
  return {.current = current, .peak = std::max(peak, current), .asked = current};
}

OwnCount::Here::Here(OwnCount& count) : before_(std::exchange(t_here, &count.tally_)) {}

OwnCount::Here::~Here() { t_here = before_; }

int64_t host_counted() { return g_counted.load(std::memory_order_relaxed); }

}  // namespace tenure
