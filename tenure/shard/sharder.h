// Sharder: the units of one model on one group. It gathers a unit when it is entered, or ahead of
// that in the order of the pass before; releases it at its last use; and adds up gradients over
// ranks. All ranks make the same calls in the same order. Any thread may call, one at a time; what
// waits, waits without Python's lock.
#pragma once

#include <tenure/shard/alias.h>
#include <tenure/shard/flat.h>
#include <tenure/shard/life.h>
#include <tenure/shard/options.h>
#include <tenure/shard/order.h>
#include <tenure/shard/stats.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tenure::shard {

// Gradients of a flat, the mean over ranks: of this rank's piece, in the piece's dtype.
struct Reduced {
  uint32_t unit = 0;
  uint32_t flat = 0;
  at::Tensor mean;
};

class Sharder {
 public:
  Sharder(Collectives collectives, Options options);
  ~Sharder();

  // A unit's parameters, in groups that become a flat each. Returns its number.
  uint32_t add(const std::string& name, const std::vector<std::vector<std::string>>& names,
               const std::vector<std::vector<at::Tensor>>& values);
  Flat& flat(uint32_t unit, uint32_t index) { return units_.at(unit).flats.at(index); }

  // A new pass begins: what an interrupted one left behind goes.
  void begin_pass();

  // The unit is needed now. It is ready when this returns, until as many calls of leave().
  void enter(uint32_t unit, Phase phase);
  // A use is over; the last one releases the unit.
  void leave(uint32_t unit, Phase phase);

  // Starts adding up over ranks. One gradient for each parameter of the flat, in the order of
  // add(); an undefined one counts as zero. Returns the sum that was started before, if one was.
  std::optional<Reduced> reduce(uint32_t unit, uint32_t flat,
                                const std::vector<at::Tensor>& gradients);
  // Waits for the last one that was started.
  std::optional<Reduced> reduced();

  bool is_ready(uint32_t unit) const;
  Stats stats() const;

 private:
  struct Unit {
    std::string name;
    std::vector<Flat> flats;
    Life life = Life::sharded;
    uint32_t users = 0;
    std::vector<Pending> gathering;
    UnitStats stats;

    uint64_t bytes() const;
    void become(Life next);
  };
  // Gradients that are being added up.
  struct Sum {
    uint32_t unit;
    uint32_t flat;
    Pending pending;
    Alias sum;
  };

  void start_gather(Unit& unit);
  void finish_gather(Unit& unit, Phase phase);
  void abandon(Unit& unit);
  void release(Unit& unit, Phase phase);
  void prefetch();
  std::optional<Reduced> finish_sum();
  std::string what(std::string_view verb, const Unit& unit, Phase phase) const;

  mutable std::mutex mutex_;
  Collectives collectives_;
  Options options_;
  std::vector<Unit> units_;
  Order order_;
  std::optional<Sum> sum_;
  uint64_t passes_ = 0;
  uint64_t gathered_bytes_ = 0;
  uint64_t needed_bytes_ = 0;
  Stats current_;
  Stats last_;
};

}  // namespace tenure::shard
