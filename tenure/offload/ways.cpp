#include <tenure/offload/ways.h>

#include <tenure/offload/planner.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace tenure::offload {
namespace {

// Prices tried lie so far apart, and go so far beyond what making one value costs: what it is made
// of may have to be made, too.
constexpr double kPriceStep = 1.2;
constexpr double kPriceBelow = 0.5;
constexpr double kPriceAbove = 1000;
// Of even ways fewer do. They make so many bytes in a second: far more than launching costs.
constexpr double kEvenStep = 2;
constexpr double kEvenPace = 1e-9;
// Descents look at so many values and ticks at the most, and try so many turns.
constexpr size_t kMostLooks = 1'000'000;
constexpr size_t kMostTurns = 400;

// By interval: with all that is held kept.
std::vector<int64_t> kept_levels(const Timeline& timeline) {
  std::vector<int64_t> change(timeline.ticks() + 1);
  const auto add = [&](uint64_t bytes, size_t begin, size_t end) {
    end = std::min(end, timeline.ticks());
    if (begin < end) {
      change[begin] += static_cast<int64_t>(bytes);
      change[end] -= static_cast<int64_t>(bytes);
    }
  };
  for (const auto& saved : timeline.saved) {
    if (!saved.remade) {
      add(saved.bytes, gone_from(saved), saved.needed);
    }
    if (saved.lasts) {
      add(saved.bytes, between_uses(saved), saved.last + 1);
    }
  }
  std::partial_sum(change.begin(), change.end(), change.begin());
  change.pop_back();
  std::ranges::transform(change, timeline.peak, change.begin(), std::plus<>());
  return change;
}

bool overlap(const std::vector<bool>& a, const std::vector<bool>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] && b[i]) {
      return true;
    }
  }
  return false;
}

}  // namespace

Ways::Ways(const Timeline& timeline, const Trace& trace, bool moves)
    : timeline_(timeline),
      trace_(trace),
      moves_(moves),
      choice_(timeline, trace),
      prices_(prices_of(choice_, kPriceStep)) {
  find_ways();
  find_even_ways();
}

Way Ways::at(const Price& price, size_t border) const {
  const auto remade = remade_at(price, border);
  return way(remade, replay(timeline_, trace_, remade));
}

std::vector<double> Ways::prices_of(const Choice& choice, double step) {
  std::vector<double> out{0};
  if (choice.least() > 0) {
    const auto end = choice.most() * kPriceAbove;
    out.push_back(choice.least() * kPriceBelow);
    while (out.back() < end) {
      out.push_back(out.back() * step);
    }
  }
  return out;
}

// All prices with each way to part forward; equal choices once.
void Ways::find_ways() {
  std::vector<Remade> free;
  for (size_t border = 0; border < choice_.borders().size(); ++border) {
    auto remade = sweep(choice_, prices_, border, free);
    auto& ways = by_price_.emplace_back();
    for (const auto& one : remade) {
      ways.push_back(add(one));
    }
    free = border == 0 ? std::move(remade) : free;
  }
}

void Ways::find_even_ways() {
  auto even = trace_;
  for (auto& call : even.calls) {
    call.seconds = 0;
    for (const auto output : call.outputs) {
      call.seconds += static_cast<double>(even.values[output].bytes) * kEvenPace;
    }
  }
  const Choice choice(timeline_, even);
  const auto prices = prices_of(choice, kEvenStep);
  Remade lowest(trace_.values.size());
  least_ = all_.front().least;
  std::vector<Remade> free;
  for (size_t border = 0; border < choice.borders().size(); ++border) {
    auto remade = sweep(choice, prices, border, free);
    for (const auto& one : remade) {
      if (const auto least = all_[add(one)].least; least < least_) {
        least_ = least;
        lowest = one;
      }
    }
    free = border == 0 ? std::move(remade) : free;
  }
  descend(Remade(trace_.values.size()));
  descend(lowest);
}

void Ways::descend(const Remade& remade) {
  const auto looks = trace_.values.size() + trace_.calls.size() + timeline_.ticks();
  auto turns = std::min(kMostTurns, kMostLooks / std::max<size_t>(looks, 1));
  auto played = replay(timeline_, trace_, remade);
  auto now = way(remade, played);
  for (bool lower = true; lower;) {
    lower = false;
    const auto levels = this->levels(played.timeline);
    const auto peak = static_cast<size_t>(std::ranges::max_element(levels) - levels.begin());
    for (const auto value : there(now.remade, played, peak)) {
      if (turns-- == 0) {
        break;
      }
      auto other = turned(now.remade, value, played);
      auto played_so = replay(timeline_, trace_, other);
      auto way = this->way(other, played_so);
      if (way.least < now.least) {
        now = std::move(way);
        played = std::move(played_so);
        lower = true;
        break;
      }
    }
  }
  if (now.least < least_) {
    least_ = now.least;
    (void)add(now.remade);
  }
}

// With it what it is made of, where that is neither held nor made again so far.
Ways::Remade Ways::turned(Remade remade, uint32_t value, const Replay& replay) const {
  if (remade[value]) {
    remade[value] = false;
    return remade;
  }
  std::vector<uint32_t> open{value};
  while (!open.empty()) {
    const auto one = open.back();
    open.pop_back();
    remade[one] = true;
    for (const auto input : trace_.calls[trace_.values[one].call].inputs) {
      const bool held = trace_.values[input].saved != kNone ||
                        std::ranges::find(replay.roots, input) != replay.roots.end();
      if (!held && !remade[input] && choice_.remakeable()[input]) {
        open.push_back(input);
      }
    }
  }
  return remade;
}

// Values whose being made again, or not, matters at that tick, the largest first.
std::vector<uint32_t> Ways::there(const Remade& remade, const Replay& replay, size_t tick) const {
  std::vector<uint32_t> out;
  const auto look = [&](uint32_t value, const SavedTrace& saved) {
    if (choice_.remakeable()[value] && gone_from(saved) <= tick &&
        tick <= std::max(saved.needed, saved.last)) {
      out.push_back(value);
    }
  };
  for (uint32_t v = 0; v < trace_.values.size(); ++v) {
    if (remade[v]) {
      if (replay.lives[v].made <= tick && tick <= replay.lives[v].last) {
        out.push_back(v);
      }
    } else if (trace_.values[v].saved != kNone) {
      look(v, replay.timeline.saved[trace_.values[v].saved]);
    }
  }
  for (size_t i = 0; i < replay.roots.size(); ++i) {
    look(replay.roots[i], replay.timeline.saved[timeline_.saved.size() + i]);
  }
  std::ranges::stable_sort(out, std::ranges::greater{},
                           [&](uint32_t v) { return trace_.values[v].bytes; });
  return out;
}

std::vector<int64_t> Ways::levels(const Timeline& timeline) const {
  return moves_ ? timeline.peak : kept_levels(timeline);
}

size_t Ways::add(const Remade& remade) {
  const auto [at, is_new] = known_.emplace(remade, all_.size());
  if (is_new) {
    all_.push_back(way(remade, replay(timeline_, trace_, remade)));
  }
  return at->second;
}

// By price. `free`: the same without borders, which holds where it crosses none.
std::vector<Ways::Remade> Ways::sweep(const Choice& choice, const std::vector<double>& prices,
                                      size_t border, const std::vector<Remade>& free) {
  std::vector<Remade> out(prices.size());
  const auto cut = [&](size_t price, const Remade& less, const Remade& more) {
    const bool known = !free.empty() && !overlap(free[price], choice.borders()[border]);
    out[price] =
        known ? free[price]
              : choice.between(less, more, {.after = prices[price]}, choice.borders()[border]);
  };
  const auto last = prices.size() - 1;
  cut(0, Remade(choice.remakeable().size()), choice.remakeable());
  cut(last, out[0], choice.remakeable());
  std::vector<std::pair<size_t, size_t>> open{{0, last}};
  while (!open.empty()) {
    const auto [low, high] = open.back();
    open.pop_back();
    if (out[low] == out[high]) {  // what is made again grows with the price
      std::fill(out.begin() + static_cast<int64_t>(low), out.begin() + static_cast<int64_t>(high),
                Remade(out[low]));
    } else if (high - low > 1) {
      const auto middle = (low + high) / 2;
      cut(middle, out[low], out[high]);
      open.emplace_back(low, middle);
      open.emplace_back(middle, high);
    }
  }
  return out;
}

Ways::Remade Ways::remade_at(const Price& price, size_t border) const {
  return choice_.at(price, choice_.borders()[border]);
}

Way Ways::way(const Remade& remade, const Replay& replay) const {
  const auto& timeline = replay.timeline;
  return {.remade = remade,
          .seconds = std::accumulate(replay.seconds.begin(), replay.seconds.end(), double{0}),
          .least = moves_ ? least_peak(timeline) : kept_peak(timeline)};
}

int64_t kept_peak(const Timeline& timeline) {
  const auto levels = kept_levels(timeline);
  return levels.empty() ? 0 : std::max<int64_t>(std::ranges::max(levels), 0);
}

}  // namespace tenure::offload
