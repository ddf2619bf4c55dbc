#include "pool.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace fake_accelerator {

namespace {

constexpr size_t kAlignment = 64;

c10::CachingAllocator::Stat& sum(c10::CachingAllocator::StatArray& stats) {
  return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

void* system_allocate(size_t bytes) {
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, rounded);
  TORCH_CHECK(data != nullptr, "the host has no memory for ", bytes, " bytes of fake memory");
  return data;
}

}  // namespace

void* Pool::allocate(size_t bytes, std::optional<c10::Stream> home, std::optional<size_t> limit) {
  settle();
  const auto fits = [&](const Block& block) { return block.bytes == bytes && block.home == home; };
  Block block;
  // The last freed first: the sooner a block is reused, the sooner a missing fence shows.
  if (auto found = std::find_if(cached_.rbegin(), cached_.rend(), fits); found != cached_.rend()) {
    block = std::move(*found);
    cached_.erase(std::next(found).base());
  } else {
    const auto room = [&] {
      return !limit || static_cast<size_t>(sum(stats_.reserved_bytes).current) + bytes <= *limit;
    };
    if (!room()) {
      ++stats_.num_alloc_retries;
      trim();
    }
    if (!room()) {
      ++stats_.num_ooms;
      return nullptr;
    }
    block = {system_allocate(bytes), bytes, home, {}, {}};
    if (policy_.poison_freed) {
      std::memset(block.data, kPoison, bytes);
    }
    ++stats_.num_device_alloc;
    sum(stats_.segment).increase(1);
    sum(stats_.reserved_bytes).increase(bytes);
  }
  sum(stats_.allocation).increase(1);
  sum(stats_.allocated_bytes).increase(bytes);
  sum(stats_.requested_bytes).increase(bytes);
  sum(stats_.active).increase(1);
  sum(stats_.active_bytes).increase(bytes);
  void* data = block.data;
  live_.emplace(data, std::move(block));
  return data;
}

size_t Pool::free(void* data) {
  Block block = std::move(live_.extract(data).mapped());
  const size_t bytes = block.bytes;
  sum(stats_.allocation).decrease(1);
  sum(stats_.allocated_bytes).decrease(bytes);
  sum(stats_.requested_bytes).decrease(bytes);
  for (const auto& stream : std::exchange(block.used_on, {})) {
    block.in_use_until.push_back(Lanes::get().here(stream));
  }
  in_use_.push_back(std::move(block));
  settle();
  return bytes;
}

void Pool::use_on(const void* data, c10::Stream stream) {
  auto found = live_.find(data);
  if (found == live_.end()) {
    return;
  }
  Block& block = found->second;
  if (block.home == stream) {
    return;
  }
  if (std::find(block.used_on.begin(), block.used_on.end(), stream) == block.used_on.end()) {
    block.used_on.push_back(stream);
  }
}

bool Pool::contains(const void* address) const {
  auto after = live_.upper_bound(address);
  if (after == live_.begin()) {
    return false;
  }
  const Block& block = std::prev(after)->second;
  return address < static_cast<const char*>(block.data) + block.bytes;
}

void Pool::trim() {
  settle();
  for (auto& block : std::exchange(cached_, {})) {
    discard(std::move(block));
  }
  give_back_discarded();
}

Pool::Stats& Pool::stats() {
  settle();
  return stats_;
}

void Pool::settle() {
  std::vector<Block> done;
  std::erase_if(in_use_, [&](Block& block) {
    const auto reached = [](const Mark& mark) { return Lanes::get().reached(mark); };
    if (!std::all_of(block.in_use_until.begin(), block.in_use_until.end(), reached)) {
      return false;
    }
    done.push_back(std::move(block));
    return true;
  });
  for (auto& block : done) {
    retire(std::move(block));
  }
  give_back_discarded();
}

void Pool::retire(Block block) {
  block.in_use_until.clear();
  sum(stats_.active).decrease(1);
  sum(stats_.active_bytes).decrease(block.bytes);
  if (policy_.poison_freed) {
    const auto poison = [data = block.data, bytes = block.bytes] {
      std::memset(data, kPoison, bytes);
    };
    if (block.home && !Lanes::get().reached(Lanes::get().here(*block.home))) {
      Lanes::get().enqueue(*block.home, poison);
    } else {
      poison();
    }
  }
  if (policy_.reuse_freed) {
    cached_.push_back(std::move(block));
  } else {
    discard(std::move(block));
  }
}

void Pool::discard(Block block) {
  sum(stats_.segment).decrease(1);
  sum(stats_.reserved_bytes).decrease(block.bytes);
  ++stats_.num_device_free;
  discarded_.push_back(std::move(block));
}

// Queued work may still touch memory that was freed too early. That must read and write garbage,
// not crash the test that looks for it: so nothing goes back to the system before all is done.
void Pool::give_back_discarded() {
  if (discarded_.empty() || !Lanes::get().quiet()) {
    return;
  }
  for (auto& block : discarded_) {
    std::free(block.data);
  }
  discarded_.clear();
}

}  // namespace fake_accelerator
