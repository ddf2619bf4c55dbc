#include <tenure/offload/ways.h>

#include <tenure/offload/planner.h>

#include <algorithm>
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

Way Ways::at(const Price& price, size_t border) const { return way(remade_at(price, border)); }

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
  least_ = all_.front().least;
  std::vector<Remade> free;
  for (size_t border = 0; border < choice.borders().size(); ++border) {
    auto remade = sweep(choice, prices, border, free);
    for (const auto& one : remade) {
      least_ = std::min(least_, all_[add(one)].least);
    }
    free = border == 0 ? std::move(remade) : free;
  }
}

size_t Ways::add(const Remade& remade) {
  const auto [at, is_new] = known_.emplace(remade, all_.size());
  if (is_new) {
    all_.push_back(way(remade));
  }
  return at->second;
}

// By price. `free`: the same without borders, which holds where it crosses none.
std::vector<Ways::Remade> Ways::sweep(const Choice& choice, const std::vector<double>& prices,
                                      size_t border, const std::vector<Remade>& free) {
  std::vector<Remade> out(prices.size());
  const auto cut = [&](size_t price) {
    const bool known = !free.empty() && !overlap(free[price], choice.borders()[border]);
    out[price] =
        known ? free[price] : choice.at({.after = prices[price]}, choice.borders()[border]);
  };
  const auto last = prices.size() - 1;
  cut(0);
  cut(last);
  std::vector<std::pair<size_t, size_t>> open{{0, last}};
  while (!open.empty()) {
    const auto [low, high] = open.back();
    open.pop_back();
    if (out[low] == out[high]) {  // what is made again grows with the price
      std::fill(out.begin() + static_cast<int64_t>(low), out.begin() + static_cast<int64_t>(high),
                Remade(out[low]));
    } else if (high - low > 1) {
      const auto middle = (low + high) / 2;
      cut(middle);
      open.emplace_back(low, middle);
      open.emplace_back(middle, high);
    }
  }
  return out;
}

Ways::Remade Ways::remade_at(const Price& price, size_t border) const {
  return choice_.at(price, choice_.borders()[border]);
}

Way Ways::way(const Remade& remade) const {
  Way out{.replay = replay(timeline_, trace_, remade)};
  out.seconds = std::accumulate(out.replay.seconds.begin(), out.replay.seconds.end(), double{0});
  const auto& timeline = out.replay.timeline;
  out.least = moves_ ? least_peak(timeline) : kept_peak(timeline);
  return out;
}

int64_t kept_peak(const Timeline& timeline) {
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
  int64_t peak = 0;
  int64_t kept = 0;
  for (size_t t = 0; t < timeline.ticks(); ++t) {
    kept += change[t];
    peak = std::max(peak, timeline.peak[t] + kept);
  }
  return peak;
}

}  // namespace tenure::offload
