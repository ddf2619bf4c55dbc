#include <tenure/inspect/trend.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

// How each function here serves the decision is in Note [What counts as growth].
namespace tenure::inspect {
namespace {

using Series = std::vector<double>;
using View = std::span<const double>;

constexpr size_t kMostPoints = 256;
constexpr size_t kMostPaired = 128;  // values, for a slope
constexpr size_t kBlocks = 16;
constexpr size_t kFewestRises = 5;
constexpr double kJump = 3;         // a rise above so many caps is no part of the growth
constexpr double kLeastRank = 3.7;  // Kendall's S in standard deviations; 12 in a row give 4.5
constexpr double kLeastHeight = 5;  // of the capped growth, in noise of a block
constexpr double kEarliestCentre = 0.44;  // of the growth in its window; logarithms are below 0.42
constexpr double kLeastPace = 0.7;        // of the pace before the window; logarithms are at 0.6
constexpr double kStopped = 5;            // mean distances of rises without a rise
constexpr double kHaphazard = 2;          // the same between rises, where they are few

double number(size_t count) { return static_cast<double>(count); }

// The value that a share of `values` is below. Reorders them.
double quantile(std::span<double> values, double share) {
  const auto at = static_cast<std::ptrdiff_t>(share * number(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<size_t>(at)];
}

// Points of `stride` values each, from `first` on. A point is the low eighth of its values: low
// enough to see through teeth, and no single dip.
Series thinned(View values, size_t first, size_t stride) {
  Series out;
  Series bucket(stride);
  for (size_t i = first; i < values.size(); i += stride) {
    std::ranges::copy(values.subspan(i, stride), bucket.begin());
    out.push_back(quantile(bucket, 0.125));
  }
  return out;
}

// Median of five: spikes and dips of up to two points go, stairs and slopes stay.
Series without_spikes(View points) {
  Series out(points.size());
  for (size_t i = 0; i < points.size(); ++i) {
    const size_t reach = std::min({size_t{2}, i, points.size() - 1 - i});
    std::array<double, 5> near{};
    std::ranges::copy(points.subspan(i - reach, 2 * reach + 1), near.begin());
    out[i] = quantile(std::span(near).first(2 * reach + 1), 0.5);
  }
  return out;
}

// What was never given back: the least value from each point on.
Series envelope(Series points) {
  for (size_t i = points.size() - 1; i-- > 0;) {
    points[i] = std::min(points[i], points[i + 1]);
  }
  return points;
}

Series rises_of(View levels) {
  Series out(levels.size() - 1);
  std::transform(levels.begin() + 1, levels.end(), levels.begin(), out.begin(), std::minus<>{});
  return out;
}

double variance_of(View values) {
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / number(values.size());
  double out = 0;
  for (const double value : values) {
    out += (value - mean) * (value - mean) / number(values.size());
  }
  return out;
}

struct Rank {
  double s = 0;
  double variance = 0;
  double deviations() const { return variance > 0 && s > 0 ? (s - 1) / std::sqrt(variance) : 0; }
};

// Kendall's S of the order in time, and its variance with ties accounted for.
Rank rank_test(View values) {
  Rank out;
  for (size_t i = 0; i < values.size(); ++i) {
    for (size_t j = i + 1; j < values.size(); ++j) {
      out.s +=
          static_cast<double>(values[j] > values[i]) - static_cast<double>(values[j] < values[i]);
    }
  }
  const auto spread = [](double n) { return n * (n - 1) * (2 * n + 5) / 18; };
  out.variance = spread(number(values.size()));
  Series sorted(values.begin(), values.end());
  std::ranges::sort(sorted);
  for (auto run = sorted.begin(); run != sorted.end();) {
    const auto end = std::upper_bound(run, sorted.end(), *run);
    out.variance -= spread(static_cast<double>(end - run));
    run = end;
  }
  return out;
}

// Standard deviation of what differs from point to point, were it independent noise.
double noise_of(View points) {
  Series moves = rises_of(points);
  const double middle = quantile(moves, 0.5);
  std::ranges::transform(moves, moves.begin(),
                         [&](double move) { return std::abs(move - middle); });
  return 1.4826 / std::sqrt(2.0) * quantile(moves, 0.5);
}

// Something that grew gradually and was given back.
struct Tooth {
  double height = 0;
  double length = 0;
};

// The tooth with this peak, above a level that was reached again after it. A steep rise is none.
std::optional<Tooth> tooth_at(View points, size_t peak, double level) {
  const double height = points[peak] - level;
  size_t begin = peak;
  double steepest = 0;
  while (begin > 0 && points[begin] > level + 0.2 * height) {
    steepest = std::max(steepest, points[begin] - points[begin - 1]);
    --begin;
  }
  const auto rise = points.subspan(begin, peak - begin + 1);
  if (rise.size() < 4 || steepest > 0.6 * height ||
      rank_test(rise).deviations() < (rise.size() < 8 ? 1.5 : 2.5)) {
    return std::nullopt;
  }
  return Tooth{.height = height, .length = number(rise.size())};
}

// Whether what grew since `flush` is no more than the teeth before it. The next one may be larger
// than those seen, and the more so the more there were.
bool is_tooth(View points, size_t flush) {
  const double level = points[flush];
  const double above = level + 0.3 * (std::ranges::max(points.first(flush)) - level);
  Tooth largest;
  double larger = 0.9;
  for (size_t i = flush; i-- > 0 && above > level;) {
    if (points[i] <= above) {
      continue;
    }
    size_t peak = i;
    while (i > 0 && points[i - 1] > above) {
      --i;
      peak = points[i] > points[peak] ? i : peak;
    }
    if (const auto tooth = tooth_at(points, peak, level)) {
      largest.height = std::max(largest.height, tooth->height);
      largest.length = std::max(largest.length, tooth->length);
      larger = std::min(larger + 0.3, 2.5);
    }
  }
  const double height = (points.back() - level) / largest.height;
  const double length = number(points.size() - flush) / largest.length;
  return largest.height > 0 &&
         ((height <= larger && length <= 3) || (length <= larger && height <= 3));
}

// How many points from the beginning can be judged: all, or those up to where an open tooth began.
size_t judged(const Series& points) {
  const Series floor = envelope(points);
  double peak = points[0];
  for (size_t i = 1; i + 1 < points.size(); ++i) {
    peak = std::max(peak, points[i]);
    const bool lowest = floor[i] == points[i] && floor[i + 1] > floor[i];
    if (lowest && 3 * (peak - points[i]) > points.back() - points[i] && is_tooth(points, i)) {
      return i + 1;
    }
  }
  return points.size();
}

// Some points gathered in blocks.
struct Window {
  size_t begin = 0;
  size_t points = 0;
  Series levels;      // the low quartile of each block
  Series rises;       // of their envelope
  double cap = 0;     // the fifth largest rise
  double growth = 0;  // the sum of the rises, none counted for more than the cap

  double in_block() const { return number(points) / number(levels.size()); }
};

Window gathered(View points, size_t begin, size_t end) {
  Window out;
  out.begin = begin;
  out.points = end - begin;
  const size_t count = out.points <= kBlocks * 3 / 2 ? out.points : kBlocks;
  for (size_t k = 0; k < count; ++k) {
    const size_t from = begin + k * out.points / count;
    const auto block = points.subspan(from, begin + (k + 1) * out.points / count - from);
    Series values(block.begin(), block.end());
    out.levels.push_back(quantile(values, 0.25));
  }
  out.rises = rises_of(envelope(out.levels));
  Series sorted = out.rises;
  std::ranges::sort(sorted, std::greater<>{});
  out.cap = sorted.size() >= kFewestRises ? sorted[kFewestRises - 1] : 0;
  for (const double rise : out.rises) {
    out.growth += std::min(rise, out.cap);
  }
  return out;
}

// The levels with jumps taken out. Not those in the first quarter: they may be the steep beginning
// of something that levels off, and another window begins after them.
Series without_jumps(const Window& window, double cap) {
  Series out = window.levels;
  double jumps = 0;
  for (size_t k = 1; k < out.size(); ++k) {
    const double rise = window.rises[k - 1];
    jumps += 4 * k > out.size() && rise > kJump * cap ? rise - cap : 0;
    out[k] -= jumps;
  }
  return out;
}

// Growth per point.
double pace_of(const Window& window, double cap) {
  return slope_of(without_jumps(window, cap)) / window.in_block();
}

struct Run {
  Series raw;
  Series points;  // without spikes
  Series floor;   // their envelope
  double least_per_point = 0;
};

bool drowns_in_noise(const Run& run, const Window& window) {
  const Series floor = envelope(window.levels);
  double given_back = 0;
  for (size_t k = 0; k < floor.size(); ++k) {
    given_back += (window.levels[k] - floor[k]) / number(floor.size());
  }
  const double noise = noise_of(View(run.raw).subspan(window.begin));
  return window.growth <
         kLeastHeight * std::max(1.4 * noise / std::sqrt(window.in_block()), given_back);
}

// Where in the window, from 0 to 1, the growth has its centre: that of the parabola through the
// levels. A straight line has it at 0.5.
double centre_of(View levels) {
  const double last = number(levels.size() - 1);
  const double square = (last + 2) / last / 3;  // mean of at * at
  double slope = 0;
  double curve = 0;
  double norm = 0;
  for (size_t k = 0; k < levels.size(); ++k) {
    const double at = 2 * number(k) / last - 1;
    const double even = at * at - square;
    slope += at * levels[k] / (square * number(levels.size()));
    curve += even * levels[k];
    norm += even * even;
  }
  return slope > 0 ? 0.5 + curve / norm / slope / 3 : 0;
}

// Variance of the rises as far as they are independent of each other. Noise of the levels does not
// count: what it adds to one rise it takes from the next.
double irregularity(View rises) {
  Series pairs(rises.size() - 1);
  std::transform(rises.begin() + 1, rises.end(), rises.begin(), pairs.begin(), std::plus<>{});
  const double of_one = variance_of(rises);
  return std::clamp(variance_of(pairs) - of_one, 0.0, of_one);
}

// Whether the growth lies too early in the window, by more than irregular or few rises explain.
bool levels_off(const Window& window) {
  const Series levels = without_jumps(window, window.cap);
  const Series rises = rises_of(levels);
  const double growth = levels.back() - levels.front();
  const double error = std::sqrt(irregularity(rises) * number(rises.size()) / 12) / growth;
  const auto risen = std::ranges::count_if(window.rises, [](double rise) { return rise > 0; });
  const double earliest =
      std::min({kEarliestCentre, 0.5 - 2 * error, 0.5 - 0.5 / static_cast<double>(risen)});
  return growth <= 0 || centre_of(levels) < earliest;
}

// Whether the pace in the window is well below the one before it. What lies before the second
// eighth of the run is warm-up.
bool slows_down(const Run& run, const Window& window) {
  const size_t earliest =
      std::max(run.points.size() / 8, window.begin - std::min(window.begin, 2 * window.points));
  if (earliest + 4 > window.begin) {
    return false;
  }
  const Window before = gathered(run.points, earliest, window.begin);
  return pace_of(window, window.cap) <
         kLeastPace * pace_of(before, std::max(before.cap, window.cap));
}

// Whether there was no rise for long: now, or, where rises are few, at any time. Those of one-time
// buffers and records of a high-water mark come at odd intervals.
bool pauses(const Run& run, const Window& window) {
  const double least = 0.25 * window.cap / window.in_block();
  size_t rises = 0;
  size_t last = window.begin;
  size_t longest = 0;
  for (size_t i = window.begin + 1; i < run.floor.size(); ++i) {
    if (run.floor[i] - run.floor[i - 1] > least) {
      longest = rises > 0 ? std::max(longest, i - last) : 0;
      last = i;
      ++rises;
    }
  }
  const size_t now = run.floor.size() - last;
  longest = std::max(longest, now);
  return number((now - 1) * rises) >= kStopped * number(window.points) ||
         (rises < 2 * kFewestRises && number(longest * rises) > kHaphazard * number(window.points));
}

// The rank test within the stretches between jumps, so that stairs alone do not pass it.
double rank_of(const Run& run, const Window& window) {
  Rank out;
  double begin = 0;
  const auto add = [&](double end) {
    const auto from = static_cast<size_t>(begin * window.in_block());
    const auto to = static_cast<size_t>(end * window.in_block());
    const auto stretch =
        rank_test(View(run.raw).subspan(window.begin + from, std::max(from, to) - from));
    out.s += stretch.s;
    out.variance += stretch.variance;
  };
  for (size_t k = 0; k < window.rises.size(); ++k) {
    if (window.rises[k] > kJump * window.cap) {
      add(number(k) + 0.25);
      begin = number(k) + 1.25;  // the jump itself may lie so late without raising block k
    }
  }
  add(number(window.levels.size()));
  return out.deviations();
}

// Where the growth of the window began: where it lagged furthest behind a steady pace, or, if it
// never lagged much, as far back as that pace goes.
size_t onset(const Run& run, const Window& window) {
  const Series& floor = run.floor;
  const double pace = window.growth / number(window.points);
  double grown = 0;
  double lag = 0;
  size_t begin = window.begin;
  for (size_t i = window.begin + 1; i < floor.size(); ++i) {
    grown += std::min(floor[i] - floor[i - 1], window.cap);
    const double behind = pace * number(i - window.begin) - grown;
    begin = behind > lag && (grown == 0 || behind >= 0.15 * window.growth) ? i : begin;
    lag = std::max(behind, lag);
  }
  const size_t reach = std::max<size_t>(3, window.points / 8);
  while (begin <= window.begin && begin >= reach) {
    const double before = (floor[begin] - floor[begin - reach]) / number(reach);
    if (before < 0.5 * pace || before > 1.6 * pace) {
      break;
    }
    begin -= reach;
  }
  return begin;
}

// How sure the growth from the window's begin on is. Absent: there is none.
std::optional<double> confidence_of(const Run& run, const Window& window) {
  if (window.growth <= 0 || window.growth < 0.8 * run.least_per_point * number(window.points) ||
      drowns_in_noise(run, window) || levels_off(window) || slows_down(run, window) ||
      pauses(run, window)) {
    return std::nullopt;
  }
  const double rank = rank_of(run, window);
  if (rank < kLeastRank) {
    return std::nullopt;
  }
  const auto rises = std::ranges::count_if(window.rises, [](double rise) { return rise > 0; });
  const double chance = 0.5 * std::erfc(rank / std::sqrt(2.0));
  return (1 - chance) * (1 - std::exp2(3 - static_cast<double>(rises)));
}

}  // namespace

double slope_of(View values) {
  const size_t stride = values.size() / kMostPaired + 1;
  Series slopes;
  for (size_t i = 0; i < values.size(); i += stride) {
    for (size_t j = i + stride; j < values.size(); j += stride) {
      slopes.push_back((values[j] - values[i]) / number(j - i));
    }
  }
  return slopes.empty() ? 0 : quantile(slopes, 0.5);
}

Trend trend_of(std::span<const double> values, const TrendOptions& options) {
  if (values.size() < kFewestSteps) {
    return {};
  }
  const size_t stride = (values.size() + kMostPoints - 1) / kMostPoints;
  const size_t first = values.size() % stride;
  Run run{.raw = thinned(values, first, stride),
          .points = {},
          .floor = {},
          .least_per_point = options.least_per_step * number(stride)};
  run.points = without_spikes(run.raw);
  run.points.resize(judged(run.points));
  run.floor = envelope(run.points);
  const size_t size = run.points.size();
  run.raw.resize(size);
  if (size < kFewestSteps) {
    return {};
  }
  const size_t latest = size - std::max(kFewestSteps, size / 4);
  for (size_t eighth = 0; eighth < 7; ++eighth) {
    const size_t start = std::min(eighth * size / 8, latest);
    const Window window = gathered(run.points, start, size);
    const auto sure = confidence_of(run, window);
    if (!sure) {
      continue;
    }
    const size_t begin = onset(run, window);
    if (size - begin >= std::max<size_t>(10, size / 5)) {
      const Window grown = gathered(run.points, begin, size);
      return {.grows = true,
              .per_step = pace_of(grown, grown.cap) / number(stride),
              .confidence = confidence_of(run, grown).value_or(*sure),
              .since = first + begin * stride};
    }
  }
  return {};
}

}  // namespace tenure::inspect
