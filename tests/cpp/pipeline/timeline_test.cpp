#include <tenure/pipeline/timeline.h>

#include <tenure/pipeline/csv.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace tenure::pipeline {
namespace {

constexpr double kExact = 1e-9;
// A backward that takes as long as a forward, and one of two halves that take as long each.
constexpr Costs kEqual{.forward = 1, .input_backward = 0.5, .weight_backward = 0.5};
constexpr Costs kThirds{.forward = 1, .input_backward = 1, .weight_backward = 1};

double worst_bubble(const Schedule& schedule, const Costs& costs) {
  const auto found = timeline(schedule, costs);
  double out = 0;
  for (uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    out = std::max(out, found.bubble(rank));
  }
  return out;
}

// Time between a rank's first action and its last one in which it has nothing to do.
double idle_within(const Timeline& found, uint32_t rank) {
  const auto& spans = found.spans[rank];
  double out = 0;
  for (size_t i = 1; i < spans.size(); ++i) {
    out += spans[i].begin - spans[i - 1].end;
  }
  return out;
}

TEST(Timeline, GpipeAndOneForwardOneBackwardHaveTheBubbleOfThePapers) {
  for (const auto* name : {"gpipe", "1f1b"}) {
    for (uint32_t ranks = 1; ranks <= 6; ++ranks) {
      for (uint32_t microbatches = 1; microbatches <= 12; ++microbatches) {
        const auto found = timeline(make_schedule(name, ranks, microbatches), kEqual);
        for (uint32_t rank = 0; rank < ranks; ++rank) {
          EXPECT_NEAR(found.bubble(rank), (ranks - 1.0) / (microbatches + ranks - 1.0), kExact)
              << name << ", " << ranks << " ranks, " << microbatches << " microbatches";
        }
      }
    }
  }
}

TEST(Timeline, InterleavingDividesTheBubbleByTheChunks) {
  for (uint32_t ranks = 1; ranks <= 5; ++ranks) {
    for (uint32_t chunks = 1; chunks <= 4; ++chunks) {
      const auto microbatches = 2 * ranks;
      const auto schedule = make_schedule("interleaved-1f1b", ranks, microbatches, chunks);
      EXPECT_NEAR(worst_bubble(schedule, kEqual),
                  (ranks - 1.0) / (microbatches * chunks + ranks - 1.0), kExact);
    }
  }
}

TEST(Timeline, ZeroBubbleH1HasAThirdOfTheBubbleOfOneForwardOneBackward) {
  for (uint32_t ranks = 1; ranks <= 6; ++ranks) {
    const auto microbatches = 4 * ranks;
    const auto found = timeline(make_schedule("zb-h1", ranks, microbatches), kThirds);
    EXPECT_NEAR(found.length, 3.0 * microbatches + ranks - 1, kExact) << ranks << " ranks";
  }
}

TEST(Timeline, ZeroBubbleVNeverWaitsOnceItHasBegun) {
  for (uint32_t ranks = 1; ranks <= 6; ++ranks) {
    for (const auto microbatches : {2 * ranks, 2 * ranks + 1, 8 * ranks}) {
      const auto found = timeline(make_schedule("zb-v", ranks, microbatches), kThirds);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        EXPECT_NEAR(idle_within(found, rank), 0, kExact)
            << "rank " << rank << " of " << ranks << ", " << microbatches << " microbatches";
      }
    }
  }
}

TEST(Timeline, ZeroBubbleVIsFarBelowOneForwardOneBackward) {
  // Its stages are half as large, so that costs of 1f1b's are twice as high.
  const Costs twice{.forward = 2, .input_backward = 2, .weight_backward = 2};
  const auto v = worst_bubble(make_schedule("zb-v", 4, 16), kThirds);
  const auto peer = worst_bubble(make_schedule("1f1b", 4, 16), twice);
  EXPECT_LT(v, peer / 4);
}

TEST(Timeline, OneRankHasNoBubble) {
  for (const auto& name : schedule_names()) {
    EXPECT_NEAR(timeline(make_schedule(name, 1, 4)).bubble(0), 0, kExact) << name;
  }
}

TEST(Timeline, SaysWhenEachActionRuns) {
  const auto found =
      timeline(from_csv("0F0,0B0\n1F0,1B0", ""),
               {.forward = 1, .input_backward = 2, .weight_backward = 3, .message = 0.5});
  EXPECT_EQ(found.spans[0][0].begin, 0);
  EXPECT_EQ(found.spans[0][0].end, 1);
  EXPECT_EQ(found.spans[1][0].begin, 1.5) << "a message takes its time";
  EXPECT_EQ(found.spans[1][1].begin, 2.5) << "between the actions of a rank there is none";
  EXPECT_EQ(found.spans[1][1].end, 7.5) << "a backward takes as long as its halves";
  EXPECT_EQ(found.spans[0][1].begin, 8);
  EXPECT_EQ(found.length, 13);
  EXPECT_NEAR(found.bubble(0), 7.0 / 13, kExact);
}

TEST(Timeline, TheWeightsOfAStageHoldNobodyUp) {
  const auto found = timeline(from_csv("0F0,0I0,0W0\n1F0,1I0,1W0", ""), kThirds);
  EXPECT_EQ(found.spans[0][1].begin, 3) << "while 1W0 runs";
}

TEST(Timeline, StagesOfOneRankNeedNoMessage) {
  const auto found =
      timeline(from_csv("0F0,1F0,1B0,0B0", ""),
               {.forward = 1, .input_backward = 1, .weight_backward = 1, .message = 100});
  EXPECT_EQ(found.length, 6);
}

TEST(Timeline, RanksThatWaitForEachOtherAreStuckWhereTheyWait) {
  Schedule crossed{.name = "", .microbatches = 2, .rank_of_stage = {0, 1}, .actions = {}};
  crossed.actions = {{{0, 0, Kind::forward},
                      {0, 0, Kind::backward},
                      {0, 1, Kind::forward},
                      {0, 1, Kind::backward}},
                     {{1, 1, Kind::forward},
                      {1, 1, Kind::backward},
                      {1, 0, Kind::forward},
                      {1, 0, Kind::backward}}};
  std::vector<Stuck> stuck;
  run_on_paper(crossed, {}, &stuck);
  ASSERT_EQ(stuck.size(), 2);
  EXPECT_EQ(stuck[0].rank, 0);
  EXPECT_EQ(stuck[0].position, 1);
  EXPECT_EQ(stuck[0].waits_for, (Action{1, 0, Kind::backward}));
  EXPECT_EQ(stuck[1].rank, 1);
  EXPECT_EQ(stuck[1].position, 0);
  EXPECT_EQ(stuck[1].waits_for, (Action{0, 1, Kind::forward}));
}

TEST(Timeline, ARankThatComesToItsEndIsNotStuck) {
  std::vector<Stuck> stuck;
  run_on_paper(make_schedule("zb-v", 3, 5), {}, &stuck);
  EXPECT_TRUE(stuck.empty());
}

}  // namespace
}  // namespace tenure::pipeline
