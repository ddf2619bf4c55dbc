// Which values are made again at a given price of a byte. Plain data.
//
// Note [The cut]
// A value that backward needs is held, at the price of its bytes, or made again, at the price of
// its call's time; then what it is made of is needed in turn. For a given price of a byte the best
// choice for all values is a minimum cut. Each value is two nodes, `in` and `out`, and each call
// that can be repeated is one:
//   in -> out            bytes x price   cut: it is held
//   source -> call       seconds         cut: it is repeated, and pays once for all its outputs
//   call -> in           endless         who is made again needs the call
//   out of input -> call endless         which needs its inputs
//   out -> sink          endless         of what autograd saved
// What cannot be made again has the source for its `in`. What others hold anyway is held for
// nothing.
//
// Note [Borders]
// A chain of values, each made of the one before, can be made again from its very beginning; but
// then backward's first need makes all of it, and all of it waits for its own turn. So forward is
// parted where few bytes cross, and what crosses is held if it is needed at all: backward makes one
// part at a time. Between the layers of a transformer that is what checkpointing holds. How fine
// the parts should be depends on the step, so several ways are tried.
//
// Note [Between two choices]
// What is made again grows with the price: so it was in every step that was tried. So once the
// choices of two prices are known only what they differ in is open to those in between, and the
// network has no other values. All prices of a step cost little more than the first two.
#pragma once

#include <tenure/offload/timeline.h>
#include <tenure/offload/trace.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tenure::offload {

// What launching a call costs beside its own time.
inline constexpr double kCallOverhead = 5e-6;
inline double remake_seconds(const CallTrace& call) { return call.seconds + kCallOverhead; }

// Seconds for a byte that is held: for values born before a tick, and for those after it.
struct Price {
  double before = 0;
  double after = 0;
  size_t tick = 0;
  double of(const ValueTrace& value) const { return value.born < tick ? before : after; }
};

class Choice {
 public:
  Choice(const Timeline& timeline, const Trace& trace);

  // Ways to part forward, none first, then ever finer: by value, whether it crosses a border.
  const std::vector<std::vector<bool>>& borders() const { return borders_; }
  // The least and the greatest seconds that making a byte again takes, strays left out.
  double least() const { return least_; }
  double most() const { return most_; }

  // By value: whether it can be made again at all.
  const std::vector<bool>& remakeable() const { return remakeable_; }
  // By value: whether it is made again.
  std::vector<bool> at(const Price& price, const std::vector<bool>& border) const;
  // The same, if no less and no more than that are: Note [Between two choices].
  std::vector<bool> between(const std::vector<bool>& less, const std::vector<bool>& more,
                            const Price& price, const std::vector<bool>& border) const;

 private:
  std::vector<bool> needed_with(const std::vector<bool>& remade) const;
  bool may_repeat(const CallTrace& call) const;
  bool may_drop(const ValueTrace& value) const;
  bool is_free(const ValueTrace& value) const;
  void find_remakeable();
  void find_wanted();
  void find_prices();
  void find_borders();
  std::vector<int64_t> crossing() const;
  std::vector<uint64_t> saved_bytes() const;
  std::vector<bool> part(uint64_t size, const std::vector<int64_t>& crossing,
                         const std::vector<uint64_t>& saved) const;

  const Timeline& timeline_;
  const Trace& trace_;
  std::vector<bool> remakeable_;    // by value
  std::vector<uint32_t> wanted_;    // values that backward needs, or that those may be made of
  std::vector<uint32_t> last_use_;  // by value: the last call that may be repeated and reads it
  std::vector<std::vector<bool>> borders_;
  double least_ = 0;
  double most_ = 0;
};

}  // namespace tenure::offload
