// SizeTable: how large each block of memory is that is only counted, so that it can be counted out
// when it is freed. Asking malloc instead would do only where torch's memory is malloc's: on arm64
// it is not. 16 bytes a block and as many in reserve. Any thread, and blocks far apart do not meet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace tenure::inspect {

class SizeTable {
 public:
  SizeTable();
  ~SizeTable();
  SizeTable(const SizeTable&) = delete;
  SizeTable& operator=(const SizeTable&) = delete;

  // REQUIRES: data is not null, and is not in the table.
  void add(const void* data, uint64_t bytes);
  // Forgets a block and returns its size, or none if it is not known.
  std::optional<uint64_t> take(const void* data);
  // Bytes that the table itself takes.
  uint64_t footprint() const;

 private:
  struct Shard;
  Shard& shard_of(const void* data) const;

  static constexpr size_t kShards = 64;
  std::unique_ptr<Shard[]> shards_;
};

}  // namespace tenure::inspect
