#include <tenure/pipeline/bound.h>

#include <tenure/pipeline/csv.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

// The figures are those of the papers: GPipe (1811.06965), PipeDream-Flush and interleaved 1F1B
// (2104.04473), breadth-first (2211.05953), zero bubble (2401.10241), DualPipe (2412.19437).

namespace tenure::pipeline {
namespace {

using Levels = std::vector<int64_t>;
using Sizes = std::vector<MicrobatchBytes>;

template <class Function>
void for_each_size(const Function& function) {
  for (uint32_t ranks = 1; ranks <= 6; ++ranks) {
    for (uint32_t microbatches = 1; microbatches <= 14; ++microbatches) {
      function(ranks, microbatches);
    }
  }
}

uint32_t most(const Schedule& schedule, uint32_t rank) {
  return most_in_flight(schedule, rank).all();
}

uint32_t most_of_any(const Schedule& schedule) {
  uint32_t out = 0;
  for (uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    out = std::max(out, most(schedule, rank));
  }
  return out;
}

TEST(InFlight, GpipeHasAllMicrobatches) {
  for_each_size([](uint32_t ranks, uint32_t microbatches) {
    const auto schedule = make_schedule("gpipe", ranks, microbatches);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(most(schedule, rank), microbatches);
    }
  });
}

TEST(InFlight, OneForwardOneBackwardHasOneForEachRankBehind) {
  for_each_size([](uint32_t ranks, uint32_t microbatches) {
    const auto schedule = make_schedule("1f1b", ranks, microbatches);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(most(schedule, rank), std::min(microbatches, ranks - rank));
    }
  });
}

TEST(InFlight, InterleavedHasARoundForEachFurtherChunk) {
  for (uint32_t ranks = 1; ranks <= 6; ++ranks) {
    for (uint32_t chunks = 1; chunks <= 4; ++chunks) {
      const auto schedule = make_schedule("interleaved-1f1b", ranks, 4 * ranks, chunks);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(most(schedule, rank), (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1);
      }
    }
  }
}

TEST(InFlight, BreadthFirstHasAllMicrobatchesOfAllItsStages) {
  EXPECT_EQ(most(make_schedule("looped-bfs", 3, 5, 2), 1), 10);
}

TEST(InFlight, ZeroBubbleH1HasNoMoreThanOneForwardOneBackwardOnItsFirstRank) {
  for (uint32_t ranks = 1; ranks <= 6; ++ranks) {
    for (const auto microbatches : {1 * ranks, 2 * ranks, 4 * ranks}) {
      EXPECT_LE(most_of_any(make_schedule("zb-h1", ranks, microbatches)), ranks);
    }
  }
}

TEST(InFlight, ZeroBubbleVHasTwiceTheRanksAsItsStagesAreHalfAsLarge) {
  for_each_size([](uint32_t ranks, uint32_t microbatches) {
    EXPECT_LE(most_of_any(make_schedule("zb-v", ranks, microbatches)), 2 * ranks)
        << ranks << " ranks, " << microbatches << " microbatches";
  });
}

TEST(InFlight, DualpipeHasOneMoreThanTwiceTheRanks) {
  for (uint32_t ranks = 1; ranks <= 6; ++ranks) {
    for (const auto microbatches : {2 * ranks, 2 * ranks + 1, 5 * ranks}) {
      EXPECT_LE(most_of_any(make_schedule("dualpipev", ranks, microbatches)), 2 * ranks + 1)
          << ranks << " ranks, " << microbatches << " microbatches";
    }
  }
}

TEST(InFlight, IsCountedAfterEachAction) {
  const auto schedule = from_csv("0F0,0F1,0I0,0B1,0W0", "");
  const std::vector<InFlight> want{{1, 0}, {2, 0}, {1, 1}, {0, 1}, {0, 0}};
  EXPECT_EQ(in_flight(schedule, 0), want);
}

TEST(InFlight, TheMostHasWholeOnesFirstAmongEquals) {
  const auto waiting_first = from_csv("0F0,0I0,0F1,0I1,0W0,0W1,0F2,0F3,0B2,0B3", "");
  EXPECT_EQ(most_in_flight(waiting_first, 0), (InFlight{.whole = 2, .waiting = 0}));
}

TEST(InFlight, WaitingOnesCountAsWell) {
  const auto schedule = from_csv("0F0,0I0,0F1,0I1,0W0,0W1", "");
  EXPECT_EQ(most_in_flight(schedule, 0), (InFlight{.whole = 1, .waiting = 1}));
}

TEST(Levels, ABackwardGivesBackWhatItsForwardTook) {
  const auto schedule = from_csv("0F0,0F1,0B0,0B1", "");
  EXPECT_EQ(levels(schedule, 0, Sizes{{100, 10}}), (Levels{100, 200, 100, 0}));
}

TEST(Levels, AnInputBackwardLeavesWhatTheWeightsNeed) {
  const auto schedule = from_csv("0F0,0F1,0I0,0I1,0W1,0W0", "");
  EXPECT_EQ(levels(schedule, 0, Sizes{{100, 30}}), (Levels{100, 200, 130, 60, 30, 0}));
}

TEST(Levels, EachStageHasItsOwnSizesInTheOrderOfTheModel) {
  const auto schedule = from_csv("0F0,2F0,2B0,0B0\n1F0,1B0", "");
  EXPECT_EQ(levels(schedule, 0, Sizes{{1, 0}, {1000, 0}}), (Levels{1, 1001, 1, 0}));
  EXPECT_EQ(levels(schedule, 1, Sizes{{7, 0}}), (Levels{7, 0}));
}

TEST(Levels, ThePeakNeedNotBeWhereTheMostAreInFlight) {
  const auto schedule = from_csv("0F0,0F1,0I0,0I1,0F2,0B2,0W0,0W1", "");
  EXPECT_EQ(most_in_flight(schedule, 0), (InFlight{.whole = 1, .waiting = 2}));
  EXPECT_EQ(peak_bytes(schedule, 0, Sizes{{100, 1}}), 200);
}

TEST(Levels, SizesBeyond32BitsAreCountedExactly) {
  const auto schedule = make_schedule("gpipe", 1, 12);
  const int64_t size = int64_t{5} << 40;
  EXPECT_EQ(peak_bytes(schedule, 0, Sizes{{size, 0}}), 12 * size);
}

}  // namespace
}  // namespace tenure::pipeline
