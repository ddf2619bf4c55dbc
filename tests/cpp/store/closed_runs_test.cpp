#include <tenure/store/closed_runs.h>

#include <gtest/gtest.h>

#include <string>

namespace tenure::store {
namespace {

ScopeName named(const std::string& id, const std::string& kind = "step") { return {kind, id}; }

TEST(ClosedRuns, NumbersThatFollowEachOtherAreOneRun) {
  ClosedRuns closed;
  for (int i = 0; i < 1'000'000; ++i) {
    closed.add(named(std::to_string(i)));
  }
  EXPECT_EQ(closed.size(), 1U);
  EXPECT_TRUE(closed.contains(named("0")));
  EXPECT_TRUE(closed.contains(named("999999")));
  EXPECT_FALSE(closed.contains(named("1000000")));
}

TEST(ClosedRuns, TheyMayCloseInAnyOrder) {
  ClosedRuns closed;
  for (int i = 0; i < 1000; ++i) {
    closed.add(named(std::to_string((i * 7) % 1000)));
    closed.add(named(std::to_string((i * 7) % 1000)));
  }
  EXPECT_EQ(closed.size(), 1U);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(closed.contains(named(std::to_string(i)))) << i;
  }
}

TEST(ClosedRuns, OneThatIsOpenIsNotTakenForClosed) {
  ClosedRuns closed;
  for (int i = 0; i < 100; ++i) {
    if (i != 50) {
      closed.add(named(std::to_string(i)));
    }
  }
  EXPECT_EQ(closed.size(), 2U);
  EXPECT_FALSE(closed.contains(named("50")));
  closed.add(named("50"));
  EXPECT_EQ(closed.size(), 1U);
  EXPECT_TRUE(closed.contains(named("50")));
}

TEST(ClosedRuns, OnlyTheNumberMayDiffer) {
  ClosedRuns closed;
  closed.add(named("epoch3-step7@a"));
  EXPECT_TRUE(closed.contains(named("epoch3-step7@a")));
  for (const auto* id : {"epoch4-step7@a", "epoch3-step8@a", "epoch3-step7@b", "epoch3-step07@a",
                         "epoch3-step7", "3", "7"}) {
    EXPECT_FALSE(closed.contains(named(id))) << id;
  }
  EXPECT_FALSE(closed.contains(named("epoch3-step7@a", "eval")));
}

TEST(ClosedRuns, ANameWithoutOneNumberIsNotKept) {
  ClosedRuns closed;
  for (const auto* id : {"", "last", "007", "00", "1234567890123456789"}) {
    closed.add(named(id));
    EXPECT_FALSE(closed.contains(named(id))) << id;
  }
  EXPECT_EQ(closed.size(), 0U);
}

TEST(ClosedRuns, RunsThatNobodyAddsToAreForgottenFirst) {
  ClosedRuns closed;
  for (int i = 0; i < 2 * static_cast<int>(kClosedRuns); ++i) {
    closed.add(named(std::to_string(i)));
    closed.add(named(std::to_string(i) + "-of-others-" + std::to_string(i), "eval"));
  }
  EXPECT_EQ(closed.size(), kClosedRuns);
  EXPECT_TRUE(closed.contains(named("0")));
  EXPECT_FALSE(closed.contains(named("0-of-others-0", "eval")));
}

}  // namespace
}  // namespace tenure::store
