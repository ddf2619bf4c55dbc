// Schedules of the largest clusters, on paper.
#include <tenure/pipeline/bound.h>
#include <tenure/pipeline/check.h>
#include <tenure/pipeline/messages.h>
#include <tenure/pipeline/schedule.h>
#include <tenure/pipeline/timeline.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <iostream>
#include <string>

namespace tenure::pipeline {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr double kMostSeconds = 20;
#else
constexpr double kMostSeconds = 1;
#endif

class Scale : public ::testing::TestWithParam<std::string> {
 protected:
  // dualpipev needs two microbatches for each rank, so that its actions grow with their square.
  bool is_square() const { return GetParam() == "dualpipev"; }
  uint32_t ranks() const { return is_square() ? 512 : 4096; }
  uint32_t microbatches() const { return is_square() ? 2 * ranks() : 64; }
  Schedule made() const { return make_schedule(GetParam(), ranks(), microbatches()); }

  template <class Function>
  void expect_fast(const char* what, const Function& function, double most = kMostSeconds) {
    // Of the processor, so that what else runs there does not count.
    const auto begin = std::clock();
    function();
    const auto took = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    std::cout << GetParam() << ", " << what << ": " << took << " s\n";
    EXPECT_LT(took, most) << what;
  }
};
INSTANTIATE_TEST_SUITE_P(Schedule, Scale, ::testing::ValuesIn(schedule_names()),
                         [](const auto& named) {
                           auto name = "of_" + named.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

TEST_P(Scale, ThousandsOfRanksAreMade) {
  expect_fast("made", [&] { EXPECT_EQ(made().ranks(), ranks()); }, kMostSeconds / 4);
}

TEST_P(Scale, ThousandsOfRanksAreChecked) {
  const auto schedule = made();
  expect_fast("checked", [&] { EXPECT_NO_THROW(check(schedule)); });
}

TEST_P(Scale, ThousandsOfRanksHaveABound) {
  const auto schedule = made();
  expect_fast("bounded", [&] {
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      EXPECT_LE(most_in_flight(schedule, rank).all(), 2 * microbatches());
    }
  });
}

TEST_P(Scale, ThousandsOfRanksHaveATimeline) {
  const auto schedule = made();
  expect_fast("timeline", [&] {
    const auto found = timeline(schedule);
    EXPECT_EQ(found.spans.back().size(), schedule.actions.back().size());
  });
}

TEST_P(Scale, ARankOfThousandsPlansItsMessages) {
  const auto schedule = made();
  expect_fast("messages of one rank", [&] {
    EXPECT_EQ(plan_messages(schedule, ranks() / 2).steps.size(),
              schedule.actions[ranks() / 2].size());
  });
}

TEST(ScaleOfOneRank, ManyMicrobatchesArePlannedInTimeAsTheirNumber) {
  const auto schedule = make_schedule("1f1b", 2, 1 << 18);
  const auto begin = std::clock();
  EXPECT_EQ(plan_messages(schedule, 1).steps.size(), schedule.actions[1].size());
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 4 * kMostSeconds);
}

}  // namespace
}  // namespace tenure::pipeline
