#include <tenure/telemetry/growth.h>

#include <tenure/telemetry/word.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace tenure::telemetry {
namespace {

constexpr double kCertain = 3.291;    // 99.9 %
constexpr double kLikely = 2.576;     // 99 %
constexpr double kAtMostFalls = 0.1;  // of what it rises, for what rises in stairs

// By how much more the test's statistic varies than among values that know nothing of each other.
double dependence(std::span<const Point> points, double slope) {
  const auto n = points.size();
  double rises = 0;
  double falls = 0;
  for (size_t i = 1; i < n; ++i) {
    const auto change = points[i].value - points[i - 1].value;
    (change > 0 ? rises : falls) += std::abs(change);
  }
  if (falls <= kAtMostFalls * rises) {
    return 1;
  }
  std::vector<double> rest(n);
  std::ranges::transform(points, rest.begin(),
                         [&](const Point& point) { return point.value - slope * point.step; });
  auto sorted = rest;
  std::ranges::nth_element(sorted, sorted.begin() + static_cast<std::ptrdiff_t>(n / 2));
  const auto middle = sorted[n / 2];
  double square = 0;
  double product = 0;
  for (size_t i = 0; i < n; ++i) {
    square += (rest[i] - middle) * (rest[i] - middle);
    product += i == 0 ? 0 : (rest[i] - middle) * (rest[i - 1] - middle);
  }
  if (square == 0) {
    return 1;
  }
  // Few values show less of it than there is.
  const auto count = static_cast<double>(n);
  const auto shown = (count * product / square + 1) / std::max(count - 4, 1.0);
  const auto next = std::clamp(shown, 0.0, 0.95);  // how alike neighbours are
  return (1 + next) / (1 - next);
}

// The slopes of all pairs of points, in order.
struct Slopes {
  std::vector<double> values;
  double points;

  double at(double place) const {
    const auto last = static_cast<double>(values.size() - 1);
    return values[static_cast<size_t>(std::lround(std::clamp(place, 0.0, last)))];
  }
  double typical() const { return at(static_cast<double>(values.size() - 1) / 2); }
  Slope within(double certainty, double dependent) const {
    const auto last = static_cast<double>(values.size() - 1);
    const auto n = points;
    const double reach = certainty * std::sqrt(n * (n - 1) * (2 * n + 5) / 18 * dependent);
    return {
        .typical = typical(), .slowest = at((last - reach) / 2), .fastest = at((last + reach) / 2)};
  }
};

// REQUIRES: two points or more.
Slopes slopes_of(std::span<const Point> points) {
  Slopes out{.values = {}, .points = static_cast<double>(points.size())};
  out.values.reserve(points.size() * (points.size() - 1) / 2);
  for (size_t i = 0; i < points.size(); ++i) {
    for (size_t j = i + 1; j < points.size(); ++j) {
      out.values.push_back((points[j].value - points[i].value) / (points[j].step - points[i].step));
    }
  }
  std::ranges::sort(out.values);
  return out;
}

}  // namespace

std::optional<Slope> slope_of(std::span<const Point> points) {
  if (points.size() < 3) {
    return std::nullopt;
  }
  const auto found = slopes_of(points);
  return found.within(kCertain, dependence(points, found.typical()));
}

void Series::add(double step, double value) {
  if (count_ > 0 && step <= points_[count_ - 1].step) {
    count_ = 0;  // it began anew
  }
  if (count_ == kMost) {
    std::shift_left(points_.begin(), points_.end(), 1);
    --count_;
  }
  points_[count_++] = {step, value};
}

std::optional<Slope> Series::slope() const { return slope_of(points()); }

std::optional<Slope> Series::growth(double least) const {
  if (count_ < kFewest) {
    return std::nullopt;
  }
  const auto all = slopes_of(points());
  const auto dependent = dependence(points(), all.typical());
  const auto slope = all.within(kCertain, dependent);
  if (slope.slowest <= least) {
    return std::nullopt;
  }
  const auto newer = slopes_of(points().subspan(count_ / 2));
  return newer.within(kLikely, dependent).slowest > least ? std::optional(slope) : std::nullopt;
}

double Series::span() const { return count_ == 0 ? 0 : points_[count_ - 1].step - points_[0].step; }

std::optional<Forecast> forecast(int64_t left, const Slope& growth, double seen) {
  constexpr double farthest = 1000;
  if (static_cast<double>(left) > farthest * seen * growth.typical) {
    return std::nullopt;
  }
  const auto steps = [&](double per_step) {
    return static_cast<int64_t>(
        std::min(static_cast<double>(left) / per_step, static_cast<double>(kMostValue)));
  };
  return Forecast{.steps = steps(growth.typical),
                  .earliest = steps(growth.fastest),
                  .latest = steps(growth.slowest)};
}

}  // namespace tenure::telemetry
