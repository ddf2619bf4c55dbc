// The ways from keeping everything to making again whatever can be: Note [The frontier]. Plain
// data.
#pragma once

#include <tenure/offload/choice.h>
#include <tenure/offload/replay.h>
#include <tenure/offload/timeline.h>
#include <tenure/offload/trace.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace tenure::offload {

// One choice of what is made again. Of a long step there are hundreds, so what such a step would be
// is not kept: replay() tells.
struct Way {
  std::vector<bool> remade;  // by value
  double seconds = 0;        // of making again
  int64_t least = 0;         // peak: with all that is held away, or kept where nothing can be moved
};

// Note [Even ways]
// Times differ from one profile to the next, and with them what is tried. What can be reached must
// not, or a budget that was said to be possible is refused the next time. So the ways of a step
// whose calls take as long as their outputs are large are tried, too. From the lowest of them, and
// from making nothing again, one value that is there at the peak after the other is turned for as
// long as that lowers it. What is found so is the least peak, whatever the times.
class Ways {
 public:
  Ways(const Timeline& timeline, const Trace& trace, bool moves);

  // The first makes nothing again.
  const std::vector<Way>& all() const { return all_; }
  // By Note [Even ways].
  int64_t least() const { return least_; }
  // Rising, from none.
  const std::vector<double>& prices() const { return prices_; }
  // By way to part forward, by price: its place among all().
  const std::vector<std::vector<size_t>>& by_price() const { return by_price_; }

  Way at(const Price& price, size_t border) const;

 private:
  using Remade = std::vector<bool>;  // by value

  void find_ways();
  void find_even_ways();
  void descend(const Remade& remade);
  Remade turned(Remade remade, uint32_t value, const Replay& replay) const;
  std::vector<uint32_t> there(const Remade& remade, const Replay& replay, size_t tick) const;
  std::vector<int64_t> levels(const Timeline& timeline) const;
  static std::vector<double> prices_of(const Choice& choice, double step);
  static std::vector<Remade> sweep(const Choice& choice, const std::vector<double>& prices,
                                   size_t border, const std::vector<Remade>& free);
  size_t add(const Remade& remade);
  Remade remade_at(const Price& price, size_t border) const;
  Way way(const Remade& remade, const Replay& replay) const;

  const Timeline& timeline_;
  const Trace& trace_;
  bool moves_;
  Choice choice_;
  std::vector<double> prices_;
  std::vector<Way> all_;
  std::map<Remade, size_t> known_;  // place among all
  int64_t least_ = 0;
  std::vector<std::vector<size_t>> by_price_;
};

// The peak if all that is held is kept.
int64_t kept_peak(const Timeline& timeline);

}  // namespace tenure::offload
