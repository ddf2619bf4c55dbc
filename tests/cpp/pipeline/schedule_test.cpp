#include <tenure/pipeline/schedule.h>

#include "says.h"
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/pipeline/check.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace tenure::pipeline {
namespace {

using Stages = std::vector<uint32_t>;

constexpr uint32_t kMostRanks = 6;
constexpr uint32_t kMostMicrobatches = 12;
constexpr uint32_t kMostChunks = 4;

struct Sizes {
  uint32_t ranks;
  uint32_t microbatches;
  uint32_t chunks;
};

template <class Function>
void for_each_size(const Function& function) {
  for (uint32_t ranks = 1; ranks <= kMostRanks; ++ranks) {
    for (uint32_t microbatches = 1; microbatches <= kMostMicrobatches; ++microbatches) {
      for (uint32_t chunks = 0; chunks <= kMostChunks; ++chunks) {
        function(Sizes{ranks, microbatches, chunks});
      }
    }
  }
}

bool divides_into_rounds(const Sizes& sizes) {
  return sizes.microbatches < sizes.ranks ||
         sizes.microbatches % (sizes.microbatches / sizes.ranks) == 0;
}

// Why a schedule cannot have these sizes, as a part of what it says; empty if it can.
std::string obstacle(const std::string& name, const Sizes& sizes) {
  const bool one_chunk = name == "gpipe" || name == "1f1b";
  const bool two_chunks = name == "zb-v" || name == "dualpipev";
  if (one_chunk && sizes.chunks > 1) {
    return "has 1 stage a rank, not " + std::to_string(sizes.chunks);
  }
  if (two_chunks && sizes.chunks != 0 && sizes.chunks != 2) {
    return "has 2 stages a rank, not " + std::to_string(sizes.chunks);
  }
  if (name == "dualpipev" && sizes.microbatches < 2 * sizes.ranks) {
    return "needs as many microbatches as stages, " + std::to_string(2 * sizes.ranks);
  }
  if ((name == "interleaved-1f1b" || name == "zb-h1") && !divides_into_rounds(sizes)) {
    return std::to_string(sizes.microbatches) + " do not divide into " +
           std::to_string(sizes.microbatches / sizes.ranks) + " rounds";
  }
  return {};
}

class Named : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Schedule, Named, ::testing::ValuesIn(schedule_names()),
                         [](const auto& named) {
                           auto name = "of_" + named.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

TEST_P(Named, RunsInEverySizeThatItCanHave) {
  for_each_size([&](const Sizes& sizes) {
    if (!obstacle(GetParam(), sizes).empty()) {
      return;
    }
    SCOPED_TRACE(text(sizes.ranks, " ranks, ", sizes.microbatches, " microbatches, ", sizes.chunks,
                      " chunks"));
    EXPECT_NO_THROW(
        check(make_schedule(GetParam(), sizes.ranks, sizes.microbatches, sizes.chunks)));
  });
}

TEST_P(Named, SaysWhyItCannotHaveTheOtherSizes) {
  for_each_size([&](const Sizes& sizes) {
    const auto why = obstacle(GetParam(), sizes);
    if (why.empty()) {
      return;
    }
    try {
      make_schedule(GetParam(), sizes.ranks, sizes.microbatches, sizes.chunks);
      ADD_FAILURE() << "made, though it " << why;
    } catch (const InputError& error) {
      EXPECT_TRUE(says(error.what(), why));
      EXPECT_TRUE(says(error.what(), "'" + GetParam() + "'"));
    }
  });
}

TEST_P(Named, HasSoManyStagesMicrobatchesAndRanks) {
  for_each_size([&](const Sizes& sizes) {
    if (sizes.chunks == 0 || !obstacle(GetParam(), sizes).empty()) {
      return;
    }
    const auto schedule = make_schedule(GetParam(), sizes.ranks, sizes.microbatches, sizes.chunks);
    EXPECT_EQ(schedule.ranks(), sizes.ranks);
    EXPECT_EQ(schedule.microbatches, sizes.microbatches);
    for (uint32_t rank = 0; rank < sizes.ranks; ++rank) {
      EXPECT_EQ(schedule.stages_of(rank).size(), sizes.chunks);
    }
  });
}

TEST_P(Named, RunsWithoutItsBackwards) {
  const auto whole = make_schedule(GetParam(), 3, 6);
  const auto forward = forward_only(whole);
  check(forward);
  size_t actions = 0;
  for (const auto& row : forward.actions) {
    actions += row.size();
  }
  EXPECT_EQ(actions, size_t{6} * whole.stages());
}

TEST_P(Named, NeedsARankAndAMicrobatch) {
  EXPECT_THROW(make_schedule(GetParam(), 0, 8), InputError);
  EXPECT_THROW(make_schedule(GetParam(), 2, 0), InputError);
}

TEST_P(Named, TellsItsName) { EXPECT_EQ(make_schedule(GetParam(), 2, 4).name, GetParam()); }

std::string row(const Schedule& schedule, uint32_t rank) {
  std::string out;
  for (const auto& action : schedule.actions[rank]) {
    out += (out.empty() ? "" : " ") + action.text();
  }
  return out;
}

TEST(Schedule, GpipeRunsAllForwardsFirst) {
  EXPECT_EQ(row(make_schedule("gpipe", 2, 3), 1), "1F0 1F1 1F2 1B0 1B1 1B2");
}

TEST(Schedule, OneForwardOneBackwardHoldsNoMoreThanTheRanksBehindIt) {
  const auto schedule = make_schedule("1f1b", 3, 4);
  EXPECT_EQ(row(schedule, 0), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  EXPECT_EQ(row(schedule, 2), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
}

TEST(Schedule, InterleavedStagesTakeTurnsInRounds) {
  const auto schedule = make_schedule("interleaved-1f1b", 2, 4, 2);
  EXPECT_EQ(row(schedule, 1), "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
}

TEST(Schedule, BreadthFirstTakesAllMicrobatchesThroughAStage) {
  EXPECT_EQ(row(make_schedule("looped-bfs", 2, 2, 2), 0), "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0");
}

TEST(Schedule, ZeroBubbleLeavesWeightsForLater) {
  const auto schedule = make_schedule("zb-h1", 2, 3);
  EXPECT_EQ(row(schedule, 0), "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2");
  EXPECT_EQ(row(schedule, 1), "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2");
}

TEST(Schedule, ALoopGoesThroughTheRanksAgain) {
  const auto schedule = make_schedule("interleaved-1f1b", 3, 3, 2);
  EXPECT_EQ(schedule.rank_of_stage, (Stages{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(schedule.stages_of(1), (Stages{1, 4}));
}

TEST(Schedule, AVTurnsRoundAtTheLastRank) {
  for (const auto* name : {"zb-v", "dualpipev"}) {
    const auto schedule = make_schedule(name, 3, 6);
    EXPECT_EQ(schedule.rank_of_stage, (Stages{0, 1, 2, 2, 1, 0})) << name;
    EXPECT_EQ(schedule.stages_of(0), (Stages{0, 5})) << name;
  }
}

TEST(Schedule, NamesAreFoundHoweverTheyAreWritten) {
  for (const auto* name : {"ZB-V", "zb_v", "zbv", "Zb V", "ZBVZeroBubble", "zbvzerobubble"}) {
    EXPECT_EQ(make_schedule(name, 2, 4).name, "zb-v") << name;
  }
  EXPECT_EQ(make_schedule("Interleaved1F1B", 2, 4).name, "interleaved-1f1b");
  EXPECT_EQ(make_schedule("InterleavedZeroBubble", 2, 4).name, "zb-h1");
}

TEST(Schedule, AnUnknownNameIsToldAllThatThereAre) {
  for (const auto* name : {"", "-", "zb", "1f1b1", "gpipé"}) {
    try {
      make_schedule(name, 2, 4);
      ADD_FAILURE() << "there is a schedule '" << name << "'";
    } catch (const InputError& error) {
      EXPECT_TRUE(says(error.what(), text("no schedule '", name, "'")));
      for (const auto& known : schedule_names()) {
        EXPECT_TRUE(says(error.what(), known));
      }
    }
  }
}

TEST(Schedule, MicrobatchesThatDoNotDivideAreToldANumberThatDoes) {
  try {
    make_schedule("interleaved-1f1b", 4, 9);
    ADD_FAILURE() << "9 microbatches divide into 2 rounds";
  } catch (const InputError& error) {
    EXPECT_TRUE(says(error.what(), "take 8"));
  }
  EXPECT_NO_THROW(make_schedule("interleaved-1f1b", 4, 8));
}

TEST(Schedule, TheMostChunksAreInWhatTooManyAreTold) {
  try {
    make_schedule("interleaved-1f1b", 1, 1, (1U << 16U) + 1);
    ADD_FAILURE() << "made";
  } catch (const InputError& error) {
    EXPECT_TRUE(says(error.what(), "65536"));
  }
}

TEST(Action, IsWrittenAsInACell) {
  EXPECT_EQ((Action{.stage = 2, .microbatch = 5, .kind = Kind::forward}.text()), "2F5");
  EXPECT_EQ((Action{.stage = 0, .microbatch = 10, .kind = Kind::backward}.text()), "0B10");
  EXPECT_EQ((Action{.stage = 1, .microbatch = 0, .kind = Kind::input_backward}.text()), "1I0");
  EXPECT_EQ((Action{.stage = 1, .microbatch = 0, .kind = Kind::weight_backward}.text()), "1W0");
}

TEST(Action, IsSaidInWords) {
  EXPECT_EQ((Action{.stage = 2, .microbatch = 5, .kind = Kind::weight_backward}.words()),
            "the weight backward of stage 2 for microbatch 5");
}

}  // namespace
}  // namespace tenure::pipeline
