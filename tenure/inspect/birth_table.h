// BirthTable: the memory of every storage that is alive, by its address, and what became of the
// others since a reader last asked. Torch-free. Any thread may call any method; a birth or a death
// takes one of many locks for some nanoseconds and never the GIL.
#pragma once

#include <tenure/inspect/origin.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace tenure::inspect {

struct Birth {
  const void* data = nullptr;
  uint64_t id = 0;  // never reused
  uint64_t bytes = 0;
  uint64_t born = 0;  // ticks()
  uint32_t step = 0;
  OriginId origin = OriginId::unknown;
  uint32_t thread = 0;  // kernel thread id
};

struct Death {
  Birth birth;
  uint64_t died = 0;  // ticks()
  uint32_t step = 0;
  bool told = false;         // whether the birth was in an earlier answer of drain()
  bool in_backward = false;  // as what autograd saved does
};

// What happened since the last drain. Storages born and gone between two drains are in `deaths`
// only.
struct Changes {
  std::vector<Birth> births;
  std::vector<Death> deaths;
};

struct Flow {
  int64_t bytes = 0;  // alive
  int64_t count = 0;
  int64_t peak = 0;                                 // most bytes alive since start_interval()
  uint64_t births = 0, born_bytes = 0, deaths = 0;  // since the beginning
  uint64_t untold = 0;  // deaths that drain() will not tell, because its reader was too slow
};

class BirthTable {
 public:
  BirthTable();
  ~BirthTable();
  BirthTable(const BirthTable&) = delete;
  BirthTable& operator=(const BirthTable&) = delete;

  void born(const void* data, uint64_t bytes, uint32_t step, OriginId origin, uint32_t thread);
  // Bytes that died, or none if the address is not known.
  std::optional<uint64_t> died(const void* data, uint32_t step, bool in_backward = false);
  std::optional<Birth> find(const void* data) const;

  // Whether births and deaths are kept for drain().
  void tell(bool on) { telling_.store(on, std::memory_order_relaxed); }
  Changes drain();

  // All that are alive, shard by shard: exact when nobody allocates meanwhile.
  std::vector<Birth> alive() const;
  Flow flow() const;
  void start_interval();
  // Steps are counted from now on: all that was so far was in step 0.
  void restart_steps();
  // Bytes that the table itself takes.
  uint64_t footprint() const;
  // Bytes alive that are counted without being known one by one.
  void count(int64_t bytes);

 private:
  struct Slot;
  struct Shard;
  Shard& shard_of(const void* data) const;

  static constexpr size_t kShards = 64;
  std::unique_ptr<Shard[]> shards_;
  std::atomic<bool> telling_{false};
  alignas(64) std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> peak_{0};
};

}  // namespace tenure::inspect
