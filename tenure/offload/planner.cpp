#include <tenure/offload/planner.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

namespace tenure::offload {
namespace {

// The part of all copying that may be spent on copies that do not pay.
constexpr double kSmallShare = 0.005;

// The allocator's level over the step under the choices made so far. What is saved first spans most
// of a step, so a long stretch is looked at, and raised, block by block.
class Level {
 public:
  Level(const Timeline& timeline, int64_t cap)
      : level_(timeline.peak), blocks_(level_.size() / kBlock + 1), cap_(cap) {
    for (size_t t = 0; t < level_.size(); ++t) {
      raise(t, 0);
    }
  }

  // Whether `bytes` more fit into the intervals [begin, end). None, where begin comes after end:
  // what others hold until backward has used it.
  bool fits(uint64_t bytes, size_t begin, size_t end) const {
    return earliest_fit(bytes, begin, end) <= begin;
  }
  void add(uint64_t bytes, size_t begin, size_t end) {
    const auto more = static_cast<int64_t>(bytes);
    end = std::min(end, level_.size());
    while (begin < end) {
      if (begin % kBlock == 0 && begin + kBlock <= end) {
        auto& block = blocks_[begin / kBlock];
        block.most += more;
        block.more += more;
        begin += kBlock;
      } else {
        raise(begin++, more);
      }
    }
  }
  // The earliest interval in [earliest, end) from which on `bytes` more fit until `end`; else end.
  size_t earliest_fit(uint64_t bytes, size_t earliest, size_t end) const {
    const auto most = cap_ - static_cast<int64_t>(bytes);
    end = std::min(end, level_.size());
    while (end > earliest) {
      if (end % kBlock == 0 && end - kBlock >= earliest && blocks_[end / kBlock - 1].most <= most) {
        end -= kBlock;
      } else if (at(end - 1) <= most) {
        --end;
      } else {
        break;
      }
    }
    return end;
  }
  int64_t peak() const {
    return level_.empty() ? 0 : std::ranges::max(blocks_, {}, &Block::most).most;
  }
  std::vector<int64_t> room() const {
    std::vector<int64_t> out;
    for (size_t t = 0; t < level_.size(); ++t) {
      out.push_back(cap_ - at(t));
    }
    return out;
  }

 private:
  static constexpr size_t kBlock = 128;
  struct Block {
    int64_t most = std::numeric_limits<int64_t>::min();  // of its intervals
    int64_t more = 0;                                    // for all of them
  };

  int64_t at(size_t t) const { return level_[t] + blocks_[t / kBlock].more; }
  void raise(size_t t, int64_t by) {
    level_[t] += by;
    auto& block = blocks_[t / kBlock];
    block.most = std::max(block.most, at(t));
  }

  std::vector<int64_t> level_;  // by interval, without what its block has more
  std::vector<Block> blocks_;
  int64_t cap_;
};

bool fits_kept(const Level& level, const SavedTrace& saved) {
  return level.fits(saved.bytes, gone_from(saved), saved.needed) &&
         (!saved.lasts || level.fits(saved.bytes, between_uses(saved), saved.last + 1));
}

void add_kept(Level& level, const SavedTrace& saved) {
  level.add(saved.bytes, gone_from(saved), saved.needed);
  if (saved.lasts) {
    level.add(saved.bytes, between_uses(saved), saved.last + 1);
  }
}

void keep(Plan& plan, size_t index, Kept why) {
  plan.actions[index] = Action::keep;
  plan.why[index] = why;
}

// All go, but for those that gain nothing by it.
Plan all_that_pay(const Timeline& timeline, Level& level, uint64_t small) {
  Plan plan;
  plan.actions.assign(timeline.saved.size(), Action::offload);
  plan.why.assign(timeline.saved.size(), Kept::budget);
  for (size_t i = 0; i < timeline.saved.size(); ++i) {
    const auto& saved = timeline.saved[i];
    if (saved.remade) {
      plan.actions[i] = Action::recompute;
    } else if (saved.gone == kNever) {
      keep(plan, i, Kept::lives_on);
    } else if (saved.bytes < small) {
      keep(plan, i, Kept::small);
      add_kept(level, saved);
    }
  }
  return plan;
}

// For each tick, the last one before it at which something was saved: the turn from forward to
// backward, as backward sees it.
std::vector<size_t> turns(const Timeline& timeline) {
  std::vector<size_t> turn(timeline.ticks(), 0);
  for (const auto& saved : timeline.saved) {
    if (saved.saved < turn.size()) {
      turn[saved.saved] = saved.saved;
    }
  }
  std::partial_sum(turn.begin(), turn.end(), turn.begin(),
                   [](size_t a, size_t b) { return std::max(a, b); });
  return turn;
}

// What is away comes back in the order of need, as early as there is room.
void schedule(Plan& plan, const Timeline& timeline, Level& level) {
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < timeline.saved.size(); ++i) {
    if (plan.actions[i] == Action::offload && timeline.saved[i].needed < timeline.ticks()) {
      order.push_back(i);
    }
  }
  std::ranges::sort(order, {}, [&](uint32_t i) { return timeline.saved[i].needed; });
  const auto turn = turns(timeline);
  plan.fetch.resize(timeline.ticks());
  plan.stays.resize(timeline.saved.size());
  size_t last = 0;
  for (const auto i : order) {
    const auto& saved = timeline.saved[i];
    const auto earliest = std::max({last, gone_from(saved), turn[saved.needed] + 1});
    const auto at = level.earliest_fit(saved.bytes, std::min(earliest, saved.needed), saved.needed);
    level.add(saved.bytes, at, saved.needed);
    plan.fetch[at].push_back(i);
    last = at;
    if (saved.stays) {
      plan.stays[i] = true;
    } else if (saved.uses > 1 && level.fits(saved.bytes, saved.needed + 1, saved.last + 1)) {
      level.add(saved.bytes, saved.needed + 1, saved.last + 1);
      plan.stays[i] = true;
    }
  }
}

// A fit plan's roots stand behind all others, whenever they were saved.
std::vector<size_t> last_saved_first(const Timeline& timeline) {
  std::vector<size_t> order(timeline.saved.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater{},
                           [&](size_t i) { return timeline.saved[i].saved; });
  return order;
}

Plan finish(Plan plan, const Timeline& timeline, Level& level) {
  schedule(plan, timeline, level);
  plan.room = level.room();
  plan.peak = level.peak();
  return plan;
}

}  // namespace

// The one in which its last holder let go: whether that interval's peak came before or after is not
// known, so it counts.
size_t gone_from(const SavedTrace& saved) {
  return std::max(saved.saved, std::max<size_t>(saved.gone, 1) - 1);
}

size_t between_uses(const SavedTrace& saved) {
  return std::max(saved.needed + 1, gone_from(saved));
}

int64_t least_peak(const Timeline& timeline) { return Level(timeline, 0).peak(); }

uint64_t small_size(const Timeline& timeline, double bandwidth, double overhead) {
  std::vector<uint64_t> sizes;
  for (const auto& saved : timeline.saved) {
    sizes.push_back(saved.bytes);
  }
  std::ranges::sort(sizes);
  const auto all = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  const auto limit = static_cast<uint64_t>(bandwidth * overhead);
  const auto below = std::ranges::lower_bound(sizes, limit) - sizes.begin();
  // So many of those may be moved all the same.
  const auto most =
      overhead > 0 ? kSmallShare * static_cast<double>(all) / static_cast<double>(limit) : 0;
  return below <= static_cast<int64_t>(most) ? 0 : sizes[below - static_cast<int64_t>(most)];
}

Plan plan_all(const Timeline& timeline, int64_t cap, uint64_t small) {
  Level level(timeline, cap);
  auto plan = all_that_pay(timeline, level, small);
  return finish(std::move(plan), timeline, level);
}

Plan plan_within(const Timeline& timeline, int64_t cap, uint64_t small) {
  Level level(timeline, cap);
  auto plan = all_that_pay(timeline, level, 0);
  const auto order = last_saved_first(timeline);
  // Small ones first, wherever they are; then Note [Earliest saved goes first].
  for (const bool only_small : {true, false}) {
    for (const auto i : order) {
      const auto& saved = timeline.saved[i];
      if (plan.actions[i] != Action::offload || (only_small && saved.bytes >= small) ||
          !fits_kept(level, saved)) {
        continue;
      }
      keep(plan, i, only_small ? Kept::small : Kept::budget);
      add_kept(level, saved);
    }
  }
  return finish(std::move(plan), timeline, level);
}

}  // namespace tenure::offload
