#include <tenure/inspect/birth_table.h>

#include <tenure/core/lock.h>
#include <tenure/core/ticks.h>

#include <mutex>
#include <utility>

namespace tenure::inspect {
namespace {

constexpr uint32_t kNone = ~uint32_t{0};
constexpr uint32_t kChunk = 512;
// What one shard keeps for a reader that does not come: 64 shards, about 64 MiB in all.
constexpr size_t kMostUntold = size_t{16} * 1024;

uint64_t hash_of(const void* data) {
  return (reinterpret_cast<uintptr_t>(data) >> 4) * 0x9E3779B97F4A7C15ULL;
}

}  // namespace

struct BirthTable::Slot {
  Birth birth;
  uint32_t next = kNone;  // in its bucket, or in the list of free slots
  bool live = false;
  bool told = false;
  bool fresh = false;  // is in its shard's list: churn while no reader comes may not lengthen it
};

struct BirthTable::Shard {
  static_assert(sizeof(Slot) <= 64);

  alignas(64) mutable Lock mutex;
  uint32_t used = 0;
  uint32_t free = kNone;
  uint32_t live = 0;
  uint64_t next_id = 1;
  uint64_t births = 0, born_bytes = 0, deaths = 0, untold = 0;
  std::vector<std::unique_ptr<Slot[]>> chunks;
  std::vector<uint32_t> buckets = std::vector<uint32_t>(16, kNone);
  std::vector<uint32_t> fresh;  // slots born in since the last drain
  std::vector<Death> dead;

  Slot& at(uint32_t index) const { return chunks[index / kChunk][index % kChunk]; }
  uint32_t& bucket_of(const void* data) {
    return buckets[(hash_of(data) >> 16) & (buckets.size() - 1)];
  }

  void grow_buckets() {
    std::vector<uint32_t> old(buckets.size() * 2, kNone);
    buckets.swap(old);
    for (auto index : old) {
      while (index != kNone) {
        auto& slot = at(index);
        const auto next = std::exchange(slot.next, bucket_of(slot.birth.data));
        bucket_of(slot.birth.data) = index;
        index = next;
      }
    }
  }

  uint32_t allocate() {
    if (live >= buckets.size()) {
      grow_buckets();
    }
    if (free != kNone) {
      return std::exchange(free, at(free).next);
    }
    if (used % kChunk == 0) {
      chunks.push_back(std::make_unique<Slot[]>(kChunk));
    }
    return used++;
  }

  // The link that leads to the slot of `data`, for unlinking; its value is kNone if there is none.
  uint32_t& link_to(const void* data) {
    auto* link = &bucket_of(data);
    while (*link != kNone && at(*link).birth.data != data) {
      link = &at(*link).next;
    }
    return *link;
  }
};

BirthTable::BirthTable() : shards_(std::make_unique<Shard[]>(kShards)) {}
BirthTable::~BirthTable() = default;

BirthTable::Shard& BirthTable::shard_of(const void* data) const {
  return shards_[hash_of(data) >> 58];
}

void BirthTable::count(int64_t bytes) {
  const auto now = bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  auto seen = peak_.load(std::memory_order_relaxed);
  while (now > seen && !peak_.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
}

void BirthTable::born(const void* data, uint64_t bytes, uint32_t step, OriginId origin,
                      uint32_t thread) {
  auto& shard = shard_of(data);
  const auto now = ticks();
  {
    std::lock_guard lock(shard.mutex);
    const auto index = shard.allocate();
    auto& slot = shard.at(index);
    const auto number = static_cast<uint64_t>(&shard - shards_.get());
    slot.birth = {data, shard.next_id++ * kShards + number, bytes, now, step, origin, thread};
    slot.live = true;
    slot.told = false;
    auto& bucket = shard.bucket_of(data);
    slot.next = std::exchange(bucket, index);
    ++shard.live;
    ++shard.births;
    shard.born_bytes += bytes;
    if (telling_.load(std::memory_order_relaxed) && !std::exchange(slot.fresh, true)) {
      shard.fresh.push_back(index);
    }
  }
  count(static_cast<int64_t>(bytes));
}

std::optional<uint64_t> BirthTable::died(const void* data, uint32_t step, bool in_backward) {
  auto& shard = shard_of(data);
  uint64_t bytes = 0;
  {
    std::lock_guard lock(shard.mutex);
    auto& link = shard.link_to(data);
    const auto index = link;
    if (index == kNone) {
      return std::nullopt;
    }
    auto& slot = shard.at(index);
    bytes = slot.birth.bytes;
    if (telling_.load(std::memory_order_relaxed)) {
      if (shard.dead.size() < kMostUntold) {
        shard.dead.push_back({slot.birth, ticks(), step, slot.told, in_backward});
      } else {
        ++shard.untold;
      }
    }
    slot.live = false;
    link = slot.next;
    slot.next = std::exchange(shard.free, index);
    --shard.live;
    ++shard.deaths;
  }
  bytes_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  return bytes;
}

std::optional<Birth> BirthTable::find(const void* data) const {
  auto& shard = shard_of(data);
  std::lock_guard lock(shard.mutex);
  const auto index = shard.link_to(data);
  return index == kNone ? std::nullopt : std::optional(shard.at(index).birth);
}

Changes BirthTable::drain() {
  Changes out;
  for (size_t i = 0; i < kShards; ++i) {
    auto& shard = shards_[i];
    std::lock_guard lock(shard.mutex);
    for (const auto index : shard.fresh) {
      auto& slot = shard.at(index);
      slot.fresh = false;
      if (slot.live && !std::exchange(slot.told, true)) {
        out.births.push_back(slot.birth);
      }
    }
    shard.fresh.clear();
    out.deaths.insert(out.deaths.end(), shard.dead.begin(), shard.dead.end());
    shard.dead.clear();
  }
  return out;
}

std::vector<Birth> BirthTable::alive() const {
  std::vector<Birth> out;
  for (size_t i = 0; i < kShards; ++i) {
    auto& shard = shards_[i];
    std::lock_guard lock(shard.mutex);
    for (uint32_t index = 0; index < shard.used; ++index) {
      if (shard.at(index).live) {
        out.push_back(shard.at(index).birth);
      }
    }
  }
  return out;
}

Flow BirthTable::flow() const {
  Flow out;
  for (size_t i = 0; i < kShards; ++i) {
    auto& shard = shards_[i];
    std::lock_guard lock(shard.mutex);
    out.count += shard.live;
    out.births += shard.births;
    out.born_bytes += shard.born_bytes;
    out.deaths += shard.deaths;
    out.untold += shard.untold;
  }
  out.bytes = bytes_.load(std::memory_order_relaxed);
  out.peak = peak_.load(std::memory_order_relaxed);
  return out;
}

uint64_t BirthTable::footprint() const {
  uint64_t bytes = 0;
  for (size_t i = 0; i < kShards; ++i) {
    const auto& shard = shards_[i];
    std::lock_guard lock(shard.mutex);
    bytes += shard.chunks.size() * kChunk * sizeof(Slot) +
             (shard.buckets.capacity() + shard.fresh.capacity()) * sizeof(uint32_t) +
             shard.dead.capacity() * sizeof(Death);
  }
  return bytes;
}

void BirthTable::restart_steps() {
  for (size_t i = 0; i < kShards; ++i) {
    auto& shard = shards_[i];
    std::lock_guard lock(shard.mutex);
    for (uint32_t index = 0; index < shard.used; ++index) {
      shard.at(index).birth.step = 0;
    }
    for (auto& death : shard.dead) {
      death.birth.step = death.step = 0;
    }
  }
}

void BirthTable::start_interval() {
  peak_.store(bytes_.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

}  // namespace tenure::inspect
