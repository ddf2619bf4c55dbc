// Schedules of the largest clusters, on paper.
#include <tenure/pipeline/bound.h>
#include <tenure/pipeline/check.h>
#include <tenure/pipeline/messages.h>
#include <tenure/pipeline/schedule.h>
#include <tenure/pipeline/timeline.h>

#include <gtest/gtest.h>

#include <ctime>
#include <iostream>
#include <string>

namespace tenure::pipeline {
namespace {

constexpr uint32_t kRanks = 4096;
constexpr uint32_t kMicrobatches = 64;
#if defined(__SANITIZE_ADDRESS__)
constexpr double kMostSeconds = 20;
#else
constexpr double kMostSeconds = 2;
#endif

class Scale : public ::testing::TestWithParam<std::string> {
 protected:
  template <class Function>
  void expect_fast(const char* what, const Function& function) {
    // Of the processor, so that what else runs there does not count.
    const auto begin = std::clock();
    function();
    const auto took = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    std::cout << GetParam() << ", " << what << ": " << took << " s\n";
    EXPECT_LT(took, kMostSeconds) << what;
  }
};
INSTANTIATE_TEST_SUITE_P(Schedule, Scale, ::testing::Values("1f1b", "zb-v"), [](const auto& named) {
  return named.param == "1f1b" ? "of_1f1b" : "of_zb_v";
});

TEST_P(Scale, FourThousandRanksAreMade) {
  expect_fast("made",
              [&] { EXPECT_EQ(make_schedule(GetParam(), kRanks, kMicrobatches).ranks(), kRanks); });
}

TEST_P(Scale, FourThousandRanksAreChecked) {
  const auto schedule = make_schedule(GetParam(), kRanks, kMicrobatches);
  expect_fast("checked", [&] { EXPECT_NO_THROW(check(schedule)); });
}

TEST_P(Scale, FourThousandRanksHaveABound) {
  const auto schedule = make_schedule(GetParam(), kRanks, kMicrobatches);
  expect_fast("bounded", [&] {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_LE(most_in_flight(schedule, rank).all(), 2 * kMicrobatches);
    }
  });
}

TEST_P(Scale, FourThousandRanksHaveATimeline) {
  const auto schedule = make_schedule(GetParam(), kRanks, kMicrobatches);
  expect_fast("timeline", [&] {
    const auto found = timeline(schedule);
    EXPECT_EQ(found.spans.back().size(), schedule.actions.back().size());
  });
}

TEST_P(Scale, ARankOfFourThousandPlansItsMessages) {
  const auto schedule = make_schedule(GetParam(), kRanks, kMicrobatches);
  expect_fast("messages of one rank", [&] {
    EXPECT_EQ(plan_messages(schedule, kRanks / 2).steps.size(),
              schedule.actions[kRanks / 2].size());
  });
}

}  // namespace
}  // namespace tenure::pipeline
