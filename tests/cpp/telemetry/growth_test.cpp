#include <tenure/telemetry/growth.h>

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace tenure::telemetry {
namespace {

constexpr double kMiB = 1 << 20;

// A repeatable number in [-1, 1).
double noise(int i) { return std::fmod(std::abs(std::sin(i * 12.9898) * 43758.5453), 1.0) * 2 - 1; }

template <class Value>
Series series(int intervals, Value value) {
  Series out;
  for (int i = 0; i < intervals; ++i) {
    out.add(10.0 * i, value(10.0 * i, i));
  }
  return out;
}

TEST(Growth, AStraightLineHasItsSlopeAndNoDoubt) {
  const auto line = series(40, [](double step, int) { return 7 * kMiB + 3000 * step; });
  const auto slope = line.growth(2048);
  ASSERT_TRUE(slope);
  EXPECT_DOUBLE_EQ(slope->typical, 3000);
  EXPECT_DOUBLE_EQ(slope->slowest, 3000);
  EXPECT_DOUBLE_EQ(slope->fastest, 3000);
  EXPECT_EQ(line.span(), 390);
  const auto end = forecast(3'000'000, *slope, line.span());
  ASSERT_TRUE(end);
  EXPECT_EQ(end->steps, 1000);
  EXPECT_EQ(end->earliest, 1000);
  EXPECT_EQ(end->latest, 1000);
}

TEST(Growth, NoiseWidensTheLimitsAroundTheTruth) {
  const auto noisy = series(60, [](double step, int i) { return 9000 * step + kMiB * noise(i); });
  const auto slope = noisy.growth(2048);
  ASSERT_TRUE(slope);
  EXPECT_LT(slope->slowest, 9000);
  EXPECT_GT(slope->fastest, 9000);
  EXPECT_NEAR(slope->typical, 9000, 2000);
  const auto end = forecast(90'000'000, *slope, noisy.span());
  ASSERT_TRUE(end);
  EXPECT_LT(end->earliest, 10'000);
  EXPECT_GT(end->latest, 10'000);
}

TEST(Growth, OfAFarFutureNothingIsSaid) {
  const Slope slope{.typical = 3000, .slowest = 3000, .fastest = 3000};
  EXPECT_TRUE(forecast(3000 * 64'000LL, slope, 64));
  EXPECT_FALSE(forecast(3000 * 64'001LL, slope, 64));
}

TEST(Growth, WhatDoesNotGrowForGoodIsSilent) {
  EXPECT_FALSE(series(64, [](double, int) { return kMiB; }).growth(2048)) << "flat";
  EXPECT_FALSE(series(64, [](double, int i) { return kMiB * noise(i); }).growth(2048)) << "noise";
  EXPECT_FALSE(series(64, [](double, int i) { return kMiB * (i % 8); }).growth(2048)) << "sawtooth";
  EXPECT_FALSE(series(64, [](double step, int) { return kMiB * 100 * (1 - std::exp(-step / 40)); })
                   .growth(2048))
      << "a warm-up";
  EXPECT_FALSE(series(64, [](double step, int) { return -9000 * step; }).growth(2048)) << "shrinks";
  EXPECT_FALSE(series(64, [](double step, int) { return 100 * step; }).growth(2048)) << "a list";
  EXPECT_FALSE(series(11, [](double step, int) { return 9000 * step; }).growth(2048))
      << "too short";
}

TEST(Growth, WhatWandersIsNotSaidToGrow) {
  // Each value is mostly the last one's: it drifts for a while and comes back.
  for (const double likeness : {0.0, 0.5, 0.9}) {
    std::mt19937 random(1);
    std::normal_distribution<double> fresh(0, 2 * kMiB);
    Series wandering;
    double value = 0;
    int said = 0;
    for (int i = 0; i < 1500; ++i) {
      value = likeness * value + fresh(random);
      wandering.add(i, 300 * kMiB + value);
      said += wandering.growth(2048) ? 1 : 0;
    }
    EXPECT_EQ(said, 0) << likeness;
  }
}

TEST(Growth, StairsThatNeverFallGrow) {
  const auto stairs = series(64, [](double, int i) { return 10 * kMiB * (i / 8); });
  EXPECT_TRUE(stairs.growth(2048));
}

TEST(Growth, OnlyTheNewestPointsCount) {
  auto stopped = series(100, [](double step, int) { return 9000 * step; });
  for (int i = 100; i < 164; ++i) {
    stopped.add(10.0 * i, 9e6);
  }
  EXPECT_FALSE(stopped.growth(2048));
}

TEST(Growth, StepsThatBeginAnewForgetThePast) {
  auto again = series(40, [](double step, int) { return 9000 * step; });
  again.add(0, 5);
  EXPECT_FALSE(again.slope());
}

}  // namespace
}  // namespace tenure::telemetry
