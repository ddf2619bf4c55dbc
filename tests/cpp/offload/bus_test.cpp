#include <tenure/offload/bus.h>

#include "llama_step.h"

#include <gtest/gtest.h>

#include <numeric>

namespace tenure::offload {
namespace {

// 10 saved in the first of two seconds, needed in the last of four.
struct OneCopy {
  Timeline timeline{
      .at_begin = 0,
      .peak = {0, 0, 0, 0},
      .level = {},
      .saved = {{.bytes = 10, .saved = 0, .gone = 1, .needed = 3, .last = 3, .uses = 1}}};
  Plan plan{.actions = {Action::offload},
            .why = {Kept::budget},
            .room = {10, 10, 10, 10},
            .fetch = {{}, {}, {0}, {}},
            .stays = {false}};
  double waits(double out, double back) const {
    return bus_seconds(timeline, plan, {.out = out, .back = back}, {1, 1, 1, 1});
  }
};

TEST(BusSeconds, CopiesBesideComputeCostNothing) { EXPECT_EQ(OneCopy().waits(10, 10), 0); }

TEST(BusSeconds, WhatIsNotBackYetIsWaitedFor) { EXPECT_DOUBLE_EQ(OneCopy().waits(10, 5), 1); }

TEST(BusSeconds, WhatHasNoRoomToLeaveSlowlyIsWaitedFor) {
  OneCopy copy;
  copy.plan.room[1] = 5;
  EXPECT_DOUBLE_EQ(copy.waits(5, 10), 1);
}

TEST(BusSeconds, WhatHasNotLeftWhenItIsFetchedStays) { EXPECT_EQ(OneCopy().waits(1, 1), 0); }

TEST(IntervalSeconds, BackwardMirrorsForwardAtHalfTheSpeed) {
  const auto step = Llama({.layers = 4}).step();
  const auto seconds = interval_seconds(step.timeline, step.trace);
  double forward = 0;
  for (const auto& call : step.trace.calls) {
    forward += call.seconds;
  }
  EXPECT_NEAR(std::accumulate(seconds.begin(), seconds.end(), 0.0), 3 * forward, 1e-9);
}

}  // namespace
}  // namespace tenure::offload
