#include <tenure/telemetry/growth.h>

#include <tenure/telemetry/word.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace tenure::telemetry {

std::optional<Slope> slope_of(std::span<const Point> points) {
  const auto n = static_cast<double>(points.size());
  if (points.size() < 3) {
    return std::nullopt;
  }
  std::vector<double> slopes;
  slopes.reserve(points.size() * (points.size() - 1) / 2);
  for (size_t i = 0; i < points.size(); ++i) {
    for (size_t j = i + 1; j < points.size(); ++j) {
      slopes.push_back((points[j].value - points[i].value) / (points[j].step - points[i].step));
    }
  }
  std::ranges::sort(slopes);
  const auto last = static_cast<double>(slopes.size() - 1);
  constexpr double ninety_nine_percent = 2.576;
  const double reach = ninety_nine_percent * std::sqrt(n * (n - 1) * (2 * n + 5) / 18);
  const auto at = [&](double place) {
    return slopes[static_cast<size_t>(std::lround(std::clamp(place, 0.0, last)))];
  };
  return Slope{.typical = at(last / 2),
               .slowest = at((last - reach) / 2),
               .fastest = at((last + reach) / 2)};
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
  const auto all = slope_of(points());
  const auto newer = slope_of(points().subspan(count_ / 2));
  return all && newer && all->slowest > least && newer->slowest > least ? all : std::nullopt;
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
