#include <tenure/offload/planner.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace tenure::offload {
namespace {

// A forward that saves `sizes`, one a tick, and a backward that needs them in reverse order.
Timeline mirror(const std::vector<uint64_t>& sizes, int64_t floor = 100) {
  Timeline out;
  const auto count = sizes.size();
  out.peak.assign(2 * count, floor);
  for (size_t i = 0; i < count; ++i) {
    const auto needed = 2 * count - 1 - i;
    out.saved.push_back({.bytes = sizes[i],
                         .saved = i,
                         .gone = std::min(i + 1, needed),
                         .needed = needed,
                         .last = needed,
                         .uses = 1});
  }
  return out;
}

// The level that a plan leads to, worked out anew: floor, what is kept, what is fetched early.
int64_t simulated_peak(const Timeline& timeline, const Plan& plan) {
  auto level = timeline.peak;
  const auto add = [&](uint64_t bytes, size_t begin, size_t end) {
    for (size_t t = begin; t < std::min(end, level.size()); ++t) {
      level[t] += static_cast<int64_t>(bytes);
    }
  };
  for (size_t i = 0; i < timeline.saved.size(); ++i) {
    const auto& saved = timeline.saved[i];
    if (plan.actions[i] == Action::keep && plan.why[i] != Kept::lives_on) {
      add(saved.bytes, gone_from(saved), saved.needed);
    }
  }
  for (size_t t = 0; t < plan.fetch.size(); ++t) {
    for (const auto i : plan.fetch[t]) {
      add(timeline.saved[i].bytes, t, timeline.saved[i].needed);
    }
  }
  return *std::max_element(level.begin(), level.end());
}

uint64_t moved(const Timeline& timeline, const Plan& plan) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < timeline.saved.size(); ++i) {
    bytes += plan.actions[i] == Action::offload ? timeline.saved[i].bytes : 0;
  }
  return bytes;
}

TEST(Planner, AmpleBudgetKeepsAll) {
  const auto timeline = mirror({10, 20, 30});
  const auto plan = plan_within(timeline, 1000, 0);
  EXPECT_EQ(moved(timeline, plan), 0U);
  EXPECT_LE(plan.peak, 160);
}

TEST(Planner, WhatIsSavedFirstGoesFirst) {
  const auto timeline = mirror({10, 10, 10, 10});
  const auto plan = plan_within(timeline, 125, 0);
  const std::vector<Action> expected{Action::offload, Action::offload, Action::keep, Action::keep};
  EXPECT_EQ(plan.actions, expected);
}

TEST(Planner, WhatIsSavedFirstGoesFirstWhereverItStands) {
  auto timeline = mirror({10, 10, 10, 10});
  std::ranges::rotate(timeline.saved, timeline.saved.begin() + 1);
  const auto plan = plan_within(timeline, 125, 0);
  const std::vector<Action> expected{Action::offload, Action::keep, Action::keep, Action::offload};
  EXPECT_EQ(plan.actions, expected);
}

TEST(Planner, WhatIsMadeAgainTakesNoPart) {
  auto timeline = mirror({10, 10, 10, 10});
  timeline.saved[2].remade = true;
  const auto plan = plan_within(timeline, 125, 0);
  const std::vector<Action> expected{Action::offload, Action::keep, Action::recompute,
                                     Action::keep};
  EXPECT_EQ(plan.actions, expected);
}

TEST(Planner, AllMovesAllThatGoes) {
  const auto timeline = mirror({10, 20, 30});
  const auto plan = plan_all(timeline, 130, 0);
  EXPECT_EQ(moved(timeline, plan), 60U);
  EXPECT_LE(simulated_peak(timeline, plan), 130);
}

TEST(Planner, WhatOthersHoldIsKeptForNothing) {
  auto timeline = mirror({10, 20, 30});
  timeline.saved[1].gone = kNever;
  const auto plan = plan_all(timeline, 130, 0);
  EXPECT_EQ(plan.actions[1], Action::keep);
  EXPECT_EQ(plan.why[1], Kept::lives_on);
}

// As the last output of a round is, in a loop over a whole step.
TEST(Planner, WhatOthersHoldPastItsUseTakesNoRoom) {
  auto timeline = mirror({10, 20, 30});
  for (auto& saved : timeline.saved) {
    saved.gone = timeline.ticks();
  }
  for (const auto small : {uint64_t{0}, uint64_t{100}}) {
    EXPECT_EQ(plan_all(timeline, 100, small).peak, 100);
    const auto plan = plan_within(timeline, 100, small);
    EXPECT_EQ(plan.peak, 100);
    EXPECT_EQ(moved(timeline, plan), 0);
  }
}

TEST(Planner, SmallOnesStay) {
  const auto timeline = mirror({1, 50, 2, 50});
  const auto plan = plan_all(timeline, 200, 10);
  EXPECT_EQ(plan.actions[0], Action::keep);
  EXPECT_EQ(plan.why[0], Kept::small);
  EXPECT_EQ(plan.actions[1], Action::offload);
}

TEST(Planner, FewSmallOnesAreMovedForNothing) {
  std::vector<uint64_t> sizes(10, 1'000'000'000);
  sizes.push_back(100);
  EXPECT_EQ(small_size(mirror(sizes), 50e9, 10e-6), 0U);
}

TEST(Planner, ManySmallOnesAreNot) {
  std::vector<uint64_t> sizes(1000, 100);
  sizes.push_back(1'000'000);
  EXPECT_GT(small_size(mirror(sizes), 50e9, 10e-6), 100U);
}

TEST(Planner, FetchesInTheOrderOfNeedAndNotBeforeTheTurn) {
  const auto timeline = mirror({10, 10, 10, 10});
  const auto plan = plan_all(timeline, 1000, 0);
  std::vector<uint32_t> order;
  for (size_t t = 0; t < plan.fetch.size(); ++t) {
    EXPECT_TRUE(t >= 4 || plan.fetch[t].empty()) << t;
    order.insert(order.end(), plan.fetch[t].begin(), plan.fetch[t].end());
  }
  EXPECT_EQ(order, (std::vector<uint32_t>{3, 2, 1, 0}));
}

TEST(Planner, StaysBetweenUsesWhereThereIsRoom) {
  auto timeline = mirror({10, 10, 10, 10});
  timeline.saved[3].uses = 2;
  timeline.saved[3].last = timeline.saved[3].needed + 1;
  EXPECT_TRUE(plan_all(timeline, 150, 0).stays[3]);
  EXPECT_FALSE(plan_all(timeline, 105, 0).stays[3]);
}

TEST(Planner, NothingSaved) {
  EXPECT_EQ(plan_all({}, 10, 0).peak, 0);
  EXPECT_EQ(least_peak({}), 0);
  EXPECT_EQ(small_size({}, 1e9, 1e-5), 0U);
}

void expect_promises_kept(unsigned seed) {
  SCOPED_TRACE(seed);
  std::mt19937 dice(seed);
  std::vector<uint64_t> sizes(1 + dice() % 60);
  for (auto& size : sizes) {
    size = 1 + dice() % 1000;
  }
  auto timeline = mirror(sizes);
  for (auto& peak : timeline.peak) {
    peak += static_cast<int64_t>(dice() % 500);
  }
  const auto all = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  const auto least = least_peak(timeline);
  uint64_t before = ~uint64_t{0};
  for (const double part : {0.0, 0.1, 0.3, 0.6, 1.0}) {
    const auto cap = least + static_cast<int64_t>(part * static_cast<double>(all));
    const auto plan = plan_within(timeline, cap, 0);
    EXPECT_LE(plan.peak, cap);
    EXPECT_LE(simulated_peak(timeline, plan), plan.peak);
    EXPECT_LE(moved(timeline, plan), before);
    before = moved(timeline, plan);
    EXPECT_TRUE(std::ranges::all_of(plan.room, [](int64_t room) { return room >= 0; }));
  }
}

// Whatever the step and the budget: the promise is what the plan leads to, and within the cap.
TEST(Planner, RandomStepsKeepTheirPromise) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    expect_promises_kept(seed);
  }
}

}  // namespace
}  // namespace tenure::offload
