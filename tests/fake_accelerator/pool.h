// Memory of one fake device, or the pinned memory of the host, with the life of CUDA's cached
// blocks:
//
//   live → freed → (waits for the streams it was used on) → cached, or given back
//
// Freeing is ordered after the work queued on the block's home stream and not after any other:
// that is what record_stream, or a fence, is for.
//
// Threading: none of its own; `Memory` in allocators.h locks.
#pragma once

#include "lanes.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <vector>

namespace fake_accelerator {

class Pool {
 public:
  using Stats = c10::CachingDeviceAllocator::DeviceStats;

  explicit Pool(const MemoryPolicy& policy) : policy_(policy) {}

  // Null where `limit` is set and no room is left within it. A block without a home (pinned memory)
  // may be reused by anyone. REQUIRES bytes > 0.
  void* allocate(size_t bytes, std::optional<c10::Stream> home, std::optional<size_t> limit);
  // REQUIRES holds(data). Returns the block's bytes.
  size_t free(void* data);
  // Memory is not reused before what is queued on `stream` when it is freed has run.
  void use_on(const void* data, c10::Stream stream);

  bool holds(const void* data) const { return live_.contains(data); }
  bool contains(const void* address) const;  // also inside a block

  // Gives back what is cached.
  void trim();
  Stats& stats();

 private:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
    std::optional<c10::Stream> home;
    std::vector<c10::Stream> used_on;
    std::vector<Mark> in_use_until;
  };

  void settle();
  void retire(Block block);
  void discard(Block block);
  void give_back_discarded();

  const MemoryPolicy& policy_;
  std::map<const void*, Block> live_;
  std::vector<Block> in_use_;  // freed, but a recorded stream has not passed the free yet
  std::vector<Block> cached_;
  std::vector<Block> discarded_;
  Stats stats_;
};

}  // namespace fake_accelerator
