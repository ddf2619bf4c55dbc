#include <tenure/inspect/size_table.h>

#include <tenure/core/lock.h>

#include <mutex>
#include <utility>
#include <vector>

namespace tenure::inspect {
namespace {

struct Block {
  const void* data = nullptr;
  uint64_t bytes = 0;
};

uint64_t hash_of(const void* data) {
  return (reinterpret_cast<uintptr_t>(data) >> 4) * 0x9E3779B97F4A7C15ULL;
}

}  // namespace

// Open addressing: a block lies at its home or in the run of blocks that follows it.
struct SizeTable::Shard {
  alignas(64) mutable Lock mutex;
  size_t live = 0;
  std::vector<Block> blocks = std::vector<Block>(16);

  size_t home_of(const void* data) const { return (hash_of(data) >> 16) & (blocks.size() - 1); }
  size_t after(size_t at) const { return (at + 1) & (blocks.size() - 1); }

  void put(Block block) {
    auto at = home_of(block.data);
    while (blocks[at].data != nullptr) {
      at = after(at);
    }
    blocks[at] = block;
  }

  void grow() {
    std::vector<Block> old(blocks.size() * 2);
    blocks.swap(old);
    for (const auto& block : old) {
      if (block.data != nullptr) {
        put(block);
      }
    }
  }

  // Moves back what would no longer be found behind the hole.
  void close_hole(size_t hole) {
    for (auto at = after(hole); blocks[at].data != nullptr; at = after(at)) {
      const auto home = home_of(blocks[at].data);
      const bool stays = hole <= at ? hole < home && home <= at : hole < home || home <= at;
      if (!stays) {
        blocks[hole] = std::exchange(blocks[at], Block());
        hole = at;
      }
    }
  }
};

SizeTable::SizeTable() : shards_(std::make_unique<Shard[]>(kShards)) {}
SizeTable::~SizeTable() = default;

SizeTable::Shard& SizeTable::shard_of(const void* data) const {
  return shards_[hash_of(data) >> 58];
}

void SizeTable::add(const void* data, uint64_t bytes) {
  auto& shard = shard_of(data);
  std::lock_guard lock(shard.mutex);
  if (4 * ++shard.live > 3 * shard.blocks.size()) {
    shard.grow();
  }
  shard.put({data, bytes});
}

std::optional<uint64_t> SizeTable::take(const void* data) {
  auto& shard = shard_of(data);
  std::lock_guard lock(shard.mutex);
  for (auto at = shard.home_of(data); shard.blocks[at].data != nullptr; at = shard.after(at)) {
    if (shard.blocks[at].data == data) {
      const auto bytes = std::exchange(shard.blocks[at], Block()).bytes;
      shard.close_hole(at);
      --shard.live;
      return bytes;
    }
  }
  return std::nullopt;
}

uint64_t SizeTable::footprint() const {
  uint64_t bytes = 0;
  for (size_t i = 0; i < kShards; ++i) {
    std::lock_guard lock(shards_[i].mutex);
    bytes += shards_[i].blocks.capacity() * sizeof(Block);
  }
  return bytes;
}

}  // namespace tenure::inspect
