#include <tenure/offload/fit_planner.h>

#include <tenure/offload/ways.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

namespace tenure::offload {
namespace {

// Between two prices, this many halvings of forward find where one should end.
constexpr int kHalvings = 9;
// That is tried with so many ways to part forward; for a point of a frontier, with fewer.
constexpr size_t kStarts = 5;
constexpr size_t kStartsOfPoint = 1;

// Of those that nobody else holds anyway.
uint64_t bytes_of(const FitPlan& plan, Action action) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < plan.timeline.saved.size(); ++i) {
    const auto& saved = plan.timeline.saved[i];
    bytes += plan.plan.actions[i] == action && saved.gone != kNever ? saved.bytes : 0;
  }
  return bytes;
}

class Fitting {
 public:
  Fitting(const Timeline& timeline, const Trace& trace, const Bus& bus)
      : timeline_(timeline),
        trace_(trace),
        bus_(bus),
        ways_(timeline, trace, bus.moves()),
        seconds_(interval_seconds(timeline, trace)) {}

  int64_t least() const { return ways_.least(); }
  int64_t most() const { return kept_peak(replay_of(ways_.all().front()).timeline); }

  // Better ones are looked for from so many starts.
  std::optional<FitPlan> best(int64_t cap, size_t most_starts) const {
    const auto seconds = seconds_of_ways(cap);
    const auto quickest = std::ranges::min_element(seconds) - seconds.begin();
    if (seconds[quickest] == kEndless) {
      return std::nullopt;
    }
    auto best = plan_for(ways_.all()[quickest], cap);
    auto starts = this->starts(seconds);
    starts.resize(std::min(starts.size(), most_starts));
    for (const auto& start : starts) {
      refine(best, start, cap);
    }
    return best;
  }

 private:
  static constexpr double kEndless = std::numeric_limits<double>::infinity();

  struct Start {
    size_t border = 0;
    size_t price = 0;
  };

  Replay replay_of(const Way& way) const { return replay(timeline_, trace_, way.remade); }

  // REQUIRES way.least <= cap.
  FitPlan plan_for(const Way& way, int64_t cap) const {
    auto played = replay_of(way);
    auto seconds = seconds_;
    std::ranges::transform(seconds, played.seconds, seconds.begin(), std::plus<>());
    auto plan = plan_within(played.timeline, cap, bus_.small);
    FitPlan out{.timeline = std::move(played.timeline),
                .roots = std::move(played.roots),
                .plan = std::move(plan),
                .asks = std::move(played.asks),
                .recorded = std::move(played.recorded),
                .recompute_seconds = way.seconds};
    out.exposed_seconds = bus_seconds(out.timeline, out.plan, bus_, seconds);
    return out;
  }

  // By way: of its plan; of one that makes more again than the quickest takes, that alone.
  std::vector<double> seconds_of_ways(int64_t cap) const {
    std::vector<size_t> order(ways_.all().size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, {}, [&](size_t i) { return ways_.all()[i].seconds; });
    std::vector<double> out(ways_.all().size(), kEndless);
    auto best = kEndless;
    for (const auto i : order) {
      if (ways_.all()[i].least <= cap) {
        out[i] = ways_.all()[i].seconds < best ? plan_for(ways_.all()[i], cap).seconds()
                                               : ways_.all()[i].seconds;
        best = std::min(best, out[i]);
      }
    }
    return out;
  }

  // Where to look for better ones, most promising first: with each way to part forward, near the
  // price whose plan is the quickest.
  std::vector<Start> starts(const std::vector<double>& seconds) const {
    std::vector<Start> out;
    std::set<std::array<size_t, 3>> known;
    const auto of = [&](const Start& start) {
      return seconds[ways_.by_price()[start.border][start.price]];
    };
    for (size_t border = 0; border < ways_.by_price().size(); ++border) {
      const auto& ways = ways_.by_price()[border];
      const auto at = std::ranges::min_element(ways, {}, [&](size_t i) { return seconds[i]; });
      const Start start{.border = border, .price = static_cast<size_t>(at - ways.begin())};
      if (of(start) < kEndless &&
          known.insert({*at, ways[below(start)], ways[above(start)]}).second) {
        out.push_back(start);
      }
    }
    std::ranges::stable_sort(out, {}, of);
    return out;
  }

  // The next lower price that leads to another way; else the lowest.
  size_t below(const Start& start) const {
    const auto& ways = ways_.by_price()[start.border];
    auto price = start.price;
    while (price > 0 && ways[price] == ways[start.price]) {
      --price;
    }
    return price;
  }
  size_t above(const Start& start) const {
    const auto& ways = ways_.by_price()[start.border];
    auto price = start.price;
    while (price + 1 < ways.size() && ways[price] == ways[start.price]) {
      ++price;
    }
    return price;
  }

  void refine(FitPlan& best, const Start& start, int64_t cap) const {
    const auto& ways = ways_.by_price()[start.border];
    const auto mix_with = [&](size_t low, size_t high) {
      if (ways_.all()[ways[low]].seconds < best.seconds()) {  // else none in between is quicker
        mix(best, cap, start.border,
            {.before = ways_.prices()[high], .after = ways_.prices()[low]});
      }
    };
    mix_with(below(start), start.price);
    if (best.exposed_seconds > 0) {
      mix_with(start.price, above(start));
    }
  }

  // Where in forward the two prices meet best.
  void mix(FitPlan& best, int64_t cap, size_t border, Price price) const {
    const auto end = forward_ticks();
    auto at = end;
    auto least = kEndless;
    const auto try_at = [&](size_t tick) {
      price.tick = tick;
      const auto seconds = try_way(best, ways_.at(price, border), cap);
      at = seconds < least ? tick : at;
      least = std::min(least, seconds);
    };
    for (size_t i = 1; i <= 4; ++i) {
      try_at(i * end / 4);
    }
    auto step = end / 8;
    for (int i = 3; i < kHalvings && step > 0; ++i, step /= 2) {
      const auto from = at;
      try_at(from - std::min(from, step));
      if (at == from && from + step < end) {
        try_at(from + step);
      }
    }
  }

  // As in seconds_of_ways().
  double try_way(FitPlan& best, const Way& way, int64_t cap) const {
    if (way.least > cap || way.seconds >= best.seconds()) {
      return way.least > cap ? kEndless : way.seconds;
    }
    auto plan = plan_for(way, cap);
    const auto seconds = plan.seconds();
    if (seconds < best.seconds()) {
      best = std::move(plan);
    }
    return seconds;
  }

  size_t forward_ticks() const {
    size_t end = 0;
    for (const auto& saved : timeline_.saved) {
      end = std::max(end, saved.saved + 1);
    }
    return end;
  }

  const Timeline& timeline_;
  const Trace& trace_;
  const Bus& bus_;
  Ways ways_;
  std::vector<double> seconds_;  // by interval, nothing made again
};

}  // namespace

std::optional<FitPlan> fit(const Timeline& timeline, const Trace& trace, const Bus& bus,
                           int64_t cap) {
  const Fitting fitting(timeline, trace, bus);
  auto best = fitting.best(cap, kStarts);
  if (best) {
    best->least = fitting.least();
  }
  return best;
}

int64_t least_fit_peak(const Timeline& timeline, const Trace& trace, const Bus& bus) {
  return Fitting(timeline, trace, bus).least();
}

std::vector<Point> frontier(const Timeline& timeline, const Trace& trace, const Bus& bus,
                            size_t points) {
  const Fitting fitting(timeline, trace, bus);
  const auto least = fitting.least();
  const auto span = static_cast<double>(std::max(fitting.most() - least, int64_t{0}));
  std::vector<Point> out;
  for (size_t i = 0; i < points; ++i) {
    const auto part =
        1 - static_cast<double>(i) / static_cast<double>(std::max<size_t>(points, 2) - 1);
    const auto cap = least + static_cast<int64_t>(std::llround(part * span));
    const auto plan = fitting.best(cap, kStartsOfPoint);
    if (!plan) {
      continue;
    }
    // A lower one is by luck: another profile may not find it.
    const Point point{.peak = std::max(plan->plan.peak, least),
                      .seconds = plan->seconds(),
                      .kept = bytes_of(*plan, Action::keep),
                      .moved = bytes_of(*plan, Action::offload),
                      .recomputed = bytes_of(*plan, Action::recompute)};
    // A lower one that is as quick makes those above it needless.
    while (!out.empty() && out.back().seconds >= point.seconds) {
      out.pop_back();
    }
    if (out.empty() || point.peak < out.back().peak) {
      out.push_back(point);
    }
  }
  return out;
}

}  // namespace tenure::offload
