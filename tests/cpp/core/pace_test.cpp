#include <tenure/core/pace.h>

#include <gtest/gtest.h>

#include <chrono>
#include <ctime>

namespace tenure {
namespace {

using namespace std::chrono_literals;

void work(std::chrono::milliseconds time) {
  const auto now = [] { return std::clock() / (CLOCKS_PER_SEC / 1000); };
  for (const auto until = now() + time.count(); now() < until;) {
  }
}

TEST(Pace, WhatTookAMillisecondIsPutOffForASecond) {
  Pace pace(1h);
  EXPECT_TRUE(pace.is_due());
  const auto begin = Pace::Clock::now();
  pace.run([] { work(5ms); });
  EXPECT_FALSE(pace.is_due());
  EXPECT_GE(pace.next() - begin, 3s);  // the clock of the work has ticks of its own
  EXPECT_LE(pace.next() - begin, 60s);
}

TEST(Pace, WaitingCostsNothing) {
  Pace pace(1h);
  const auto begin = Pace::Clock::now();
  pace.run([] {
    ::timespec time{0, 20'000'000};
    ::nanosleep(&time, nullptr);
  });
  EXPECT_LE(pace.next() - begin, 10s);  // and not 20
}

TEST(Pace, ItIsNeverPutOffForLongerThanItMayBe) {
  Pace pace(50ms);
  const auto begin = Pace::Clock::now();
  pace.run([] { work(5ms); });
  EXPECT_LE(pace.next() - begin, 60ms);
}

TEST(Pace, WhatIsFreeIsNotPutOff) {
  Pace pace(1h, 12ms);
  pace.run([] { work(2ms); });
  EXPECT_TRUE(pace.is_due());
  pace.run([] { work(20ms); });
  EXPECT_FALSE(pace.is_due());
}

}  // namespace
}  // namespace tenure
