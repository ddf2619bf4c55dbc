// Sharder: the units of one model on one group. It gathers a unit when it is entered, or ahead of
// that in the order of the pass before; releases it at its last use; and adds up gradients over
// ranks. All ranks make the same calls in the same order. Any thread may call, one at a time; what
// waits, waits without Python's lock.
#pragma once

#include <tenure/core/error.h>
#include <tenure/shard/agreement.h>
#include <tenure/shard/flat.h>
#include <tenure/shard/gradients.h>
#include <tenure/shard/life.h>
#include <tenure/shard/options.h>
#include <tenure/shard/order.h>
#include <tenure/shard/part.h>
#include <tenure/shard/stats.h>
#include <tenure/shard/turn.h>

#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tenure::shard {

enum class Backward : uint8_t { outermost, inner };

// Gradients of a flat, the mean over ranks: of this rank's piece, in the piece's dtype.
struct Reduced {
  uint32_t unit = 0;
  uint32_t flat = 0;
  at::Tensor mean;
  std::vector<bool> came;  // by parameter: whether it had a gradient, on any rank
};

class Sharder {
 public:
  Sharder(Collectives collectives, Agreement agreement, Options options);
  ~Sharder();

  // A unit's parameters, in groups that become a flat each. Returns its number. A collective, which
  // throws on all ranks if it does on one; then the unit is not there.
  uint32_t add(const std::string& name, const std::vector<std::vector<std::string>>& names,
               const std::vector<std::vector<at::Tensor>>& values, Stay stay = Stay::while_used);
  uint32_t count() const;
  // Units from this one on were not taken over by all: they go.
  void keep_first(uint32_t count);
  Flat& flat(uint32_t unit, uint32_t index) { return units_.at(unit).flats.at(index); }

  // A new pass begins: what an interrupted one left behind goes.
  void begin_pass();
  // The pass was ended by an exception, which the program has: units go, and writes to them are not
  // looked for, as autograd may be the one who has told of them. Before the next one begins.
  void give_up_pass();

  // The unit is needed now. It is ready when this returns, until as many calls of leave(). Returns
  // which values it has: another number once its pieces were written to.
  uint64_t enter(uint32_t number, Phase phase);
  // For a backward of a forward that had these. Throws MutationError if the pieces were written to
  // since: gradients would be wrong.
  void require_values(uint32_t number, uint64_t values) const;
  // A use is over; the last one releases the unit.
  void leave(uint32_t number, Phase phase);

  // The two halves of enter(), for who gathers ahead on its own: begins to gather the unit, and
  // waits until it is ready. A collective is begun in the first, so ranks agree there.
  void gather(uint32_t number, Phase phase);
  void use(uint32_t number, Phase phase);

  // Gathers all units in a pass of their own, and keeps them until let_go() or drop_hold(). As long
  // as that lasts no other pass begins, uses change nothing and no sums are started. Throws
  // InputError if a hold lasts already.
  void hold();
  // Releases what is held. Then throws MutationError if it was written to since, or its pieces.
  void let_go();
  // The same after an exception: what came of gradients goes too, and writes are not looked for.
  void drop_hold() noexcept;

  // Units whose memory does not go any more, and why.
  std::vector<std::string> stuck() const;

  // The unit was still in use a moment ago: its release lags behind this moment at most.
  void touch(uint32_t unit);

  // A parameter's gradient has come; what came before is added to.
  void take(uint32_t number, uint32_t index, size_t parameter, const at::Tensor& gradient,
            Memory memory = Memory::given);
  // Starts adding up over ranks what has come for the unit, unless that is put off; nothing came:
  // nothing happens.
  void add_up(uint32_t number);
  // While it is put off, gradients stay whole on each rank, until a backward has added them up over
  // ranks with its own.
  void put_off_sums(bool off);
  // What was put off goes.
  void drop_put_off();
  // A backward is over: waits for its sums, and for those of units that still have gradients,
  // unless another backward is around this one. In a hold nothing happens.
  std::vector<Reduced> end_backward(Backward which = Backward::outermost);
  // A backward was given up: what came of its gradients goes, unless it was put off.
  void drop_gradients();

  // Whole tensors from pieces of any kind: values, gradients, what an optimizer has. One for each
  // parameter of the flat, all of one dtype; an undefined one counts as zero. A collective.
  std::vector<at::Tensor> join(uint32_t number, uint32_t index,
                               const std::vector<at::Tensor>& pieces);

  Stats stats() const;
  // Of the pass that runs or was the last to run, without units; nothing while a collective is
  // waited for.
  std::optional<Stats> pass() const;

 private:
  struct Unit {
    std::string name;
    std::vector<Flat> flats;
    Stay stay = Stay::while_used;
    Life life = Life::sharded;
    uint32_t users = 0;
    std::vector<Gradients> gradients;  // by flat, of the backward that runs
    std::vector<Gradients> put_off;    // by flat
    bool adds_put_off = false;         // the backward that runs has, which may still fail
    std::vector<Pending> gathering;    // by flat, as far as they were begun
    bool has_streams = false;          // its device
    Turn turn;                         // with its memory
    uint64_t gather_began = 0;         // ticks
    uint64_t last_use = 0;             // ticks
    UnitStats stats;

    uint64_t bytes() const;
    uint64_t moving_bytes() const;  // those that come and go
    uint64_t values() const;
    bool has_gradients() const;
    void take_turn();
    void become(Life next);
  };
  // Gradients that are being added up.
  struct Adding {
    uint32_t unit;
    uint32_t flat;
    Sum sum;
    std::vector<bool> came;
    Turn turn;  // with what is added up
  };

  void require_none_failed(const std::exception_ptr& failed, const std::string& unit);
  static MutationError written_too_early(const Unit& unit);
  void start_pass();
  void start_gather(Unit& unit);
  void begin_use(Unit& unit);
  void share_came();
  void start_sums(uint32_t number);
  void finish_gather(Unit& unit, Use use);
  void abandon(Unit& unit);
  void stop_using(Unit& unit);
  void release(Unit& unit, const std::string& when);
  void release_held();
  void drop_all_gradients();
  void prefetch();
  void finish_sums();
  // Before a use that starts collectives.
  void agree(Use use);
  void wait(const Pending& pending, const Place& place);
  Place here(Use use) const { return {passes_, order_.position(), use}; }
  std::string tell(const Use& use) const;
  std::string tell(const Place& place) const;

  mutable std::mutex mutex_;
  Collectives collectives_;
  Agreement agreement_;
  Options options_;
  std::vector<Unit> units_;
  Order order_;
  std::vector<Adding> sums_;   // being added up
  std::vector<Reduced> done_;  // not asked for yet
  Turn done_turn_;
  std::vector<Fence> coming_;  // what is done, on its way to the host
  bool sums_off_ = false;
  bool held_ = false;
  uint64_t passes_ = 0;
  uint64_t gathered_bytes_ = 0;
  uint64_t needed_bytes_ = 0;
  Stats current_;
  Stats last_;
};

}  // namespace tenure::shard
