#include <tenure/train/schedule.h>

#include <gtest/gtest.h>

#include <cmath>

namespace tenure::train {
namespace {

constexpr Schedule kSchedule{.peak = 1.0, .least = 0.1, .warm_up = 10, .steps = 110};

TEST(LearningRate, RisesInALineToThePeak) {
  EXPECT_DOUBLE_EQ(learning_rate(kSchedule, 0), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(kSchedule, 4), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(kSchedule, 9), 1.0);
}

TEST(LearningRate, FallsHalfACosine) {
  EXPECT_DOUBLE_EQ(learning_rate(kSchedule, 10), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(kSchedule, 60), 0.55);
  EXPECT_NEAR(learning_rate(kSchedule, 35), 0.1 + 0.9 * (1 + std::sqrt(0.5)) / 2, 1e-12);
}

TEST(LearningRate, StaysAtTheLeastAfterTheLastStep) {
  EXPECT_DOUBLE_EQ(learning_rate(kSchedule, 110), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(kSchedule, 1'000'000), 0.1);
}

TEST(LearningRate, WithoutWarmUpBeginsAtThePeak) {
  EXPECT_DOUBLE_EQ(learning_rate({.peak = 3e-4, .steps = 5}, 0), 3e-4);
}

TEST(LearningRate, OfARunThatIsAllWarmUpEndsAtThePeak) {
  const Schedule schedule{.peak = 1.0, .least = 0, .warm_up = 5, .steps = 5};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 4), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 5), 0.0);
}

}  // namespace
}  // namespace tenure::train
