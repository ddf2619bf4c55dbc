// Growth: how fast a figure rises from step to step, and when it will have nowhere to go. Pure.
//
// Note [Growth and its uncertainty]
// The slope is Theil and Sen's, the median over all pairs of points, which a few wild values do not
// bend; its limits are the pairs' slopes at the places that Kendall's test gives for 99.9 %: it is
// made anew at each interval of a long run. Growth is said to be there if both the whole window's
// and its newer half's lower limit (that for 99 %) are above a threshold: a warm-up that levels off
// and a sawtooth are not.
//
// The test takes points for independent. Memory is not: what it has now it mostly has at the next
// interval, so a flat series wanders. The limits are as much wider as neighbours are alike, once
// the slope is taken off. What hardly ever falls does not wander, it rises in stairs: its limits
// stay.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace tenure::telemetry {

struct Slope {
  double typical = 0;
  double slowest = 0;
  double fastest = 0;
};

struct Point {
  double step = 0;
  double value = 0;
};

// Fewer than three points have none. Steps must rise.
std::optional<Slope> slope_of(std::span<const Point> points);

// The newest points of one figure.
class Series {
 public:
  static constexpr size_t kMost = 64;
  static constexpr size_t kFewest = 12;  // with fewer nothing is said to grow

  void add(double step, double value);
  // Of all points kept.
  std::optional<Slope> slope() const;
  // The same, if it grows for good by more than `least` a step.
  std::optional<Slope> growth(double least) const;
  // Steps from the first point to the last.
  double span() const;

 private:
  std::span<const Point> points() const { return {points_.data(), count_}; }

  std::array<Point, kMost> points_{};  // oldest first
  size_t count_ = 0;
};

struct Forecast {
  int64_t steps = 0;
  int64_t earliest = 0;
  int64_t latest = 0;
};

// When `left` bytes are gone at a growth that was seen for so many steps. Nothing is said of a
// future that is a thousand times as long as that. REQUIRES: growth.slowest > 0.
std::optional<Forecast> forecast(int64_t left, const Slope& growth, double seen);

}  // namespace tenure::telemetry
