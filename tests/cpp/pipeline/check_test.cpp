#include <tenure/pipeline/check.h>

#include "says.h"
#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tenure::pipeline {
namespace {

constexpr Kind kF = Kind::forward;
constexpr Kind kB = Kind::backward;
constexpr Kind kI = Kind::input_backward;
constexpr Kind kW = Kind::weight_backward;

// A stage a rank, in their order.
Schedule of(uint32_t microbatches, std::vector<std::vector<Action>> actions) {
  Schedule out;
  out.microbatches = microbatches;
  out.actions = std::move(actions);
  for (uint32_t rank = 0; rank < out.ranks(); ++rank) {
    out.rank_of_stage.push_back(rank);
  }
  return out;
}

// What the check says; empty if it passes.
std::string refusal(const Schedule& schedule) {
  try {
    check(schedule);
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

TEST(Check, AScheduleThatRunsPasses) {
  EXPECT_EQ(refusal(of(1, {{{0, 0, kF}, {0, 0, kB}}, {{1, 0, kF}, {1, 0, kI}, {1, 0, kW}}})), "");
}

TEST(Check, OneWithoutAnyBackwardPasses) {
  EXPECT_EQ(refusal(of(2, {{{0, 0, kF}, {0, 1, kF}}, {{1, 0, kF}, {1, 1, kF}}})), "");
}

TEST(Check, OneWithABackwardNeedsThemAll) {
  const auto said = refusal(of(2, {{{0, 0, kF}, {0, 1, kF}, {0, 1, kB}}}));
  EXPECT_TRUE(
      says(said, "rank 0 has no 0B0", "the backward of stage 0 for microbatch 0 is missing"));
}

TEST(Check, ForwardsMayComeInAnyOrder) {
  EXPECT_EQ(refusal(of(2, {{{0, 1, kF}, {0, 0, kF}, {0, 0, kB}, {0, 1, kB}}})), "");
}

TEST(Check, SwappedCellsThatWaitForEachOtherAreADeadlock) {
  auto schedule = of(2, {{{0, 0, kF}, {0, 0, kB}, {0, 1, kF}, {0, 1, kB}},
                         {{1, 0, kF}, {1, 0, kB}, {1, 1, kF}, {1, 1, kB}}});
  ASSERT_EQ(refusal(schedule), "");
  std::swap(schedule.actions[1][0], schedule.actions[1][2]);
  std::swap(schedule.actions[1][1], schedule.actions[1][3]);
  const auto said = refusal(schedule);
  EXPECT_TRUE(says(said, "deadlock"));
  EXPECT_TRUE(says(said,
                   "rank 0, cell 1 (0B0) waits for the backward of stage 1 for "
                   "microbatch 0 on rank 1"));
  EXPECT_TRUE(says(said,
                   "rank 1, cell 0 (1F1) waits for the forward of stage 0 for "
                   "microbatch 1 on rank 0"));
}

TEST(Check, ADeadlockOfManyRanksNamesSomeAndCountsTheRest) {
  auto schedule = make_schedule("gpipe", 9, 2);
  // Its first rank wants gradients before it sends microbatch 1; its last one does both forwards
  // before it gives any.
  schedule.actions[0] = {{0, 0, kF}, {0, 0, kB}, {0, 1, kF}, {0, 1, kB}};
  const auto said = refusal(schedule);
  EXPECT_TRUE(says(said, "rank 0, cell 1 (0B0)", "rank 3, cell 1 (3F1)", "and 5 more ranks wait"));
  EXPECT_FALSE(says(said, "rank 4, cell"));
}

TEST(Check, ARankThatWaitsForItselfIsADeadlock) {
  Schedule schedule;
  schedule.microbatches = 1;
  schedule.rank_of_stage = {0, 0};
  schedule.actions = {{{1, 0, kF}, {0, 0, kF}}};
  EXPECT_TRUE(says(refusal(schedule), "rank 0, cell 0 (1F0)", "on rank 0"));
}

TEST(Check, AMissingForwardIsNamed) {
  EXPECT_TRUE(says(refusal(of(2, {{{0, 0, kF}}})),
                   "rank 0 has no 0F1: the forward of stage 0 for microbatch 1 is missing"));
}

TEST(Check, AStageThatNobodyRunsIsNamed) {
  auto schedule = of(1, {{{0, 0, kF}}, {}});
  EXPECT_TRUE(says(refusal(schedule), "rank 1 has no 1F0"));
}

TEST(Check, ARepeatedActionIsNamedWithBothItsCells) {
  EXPECT_TRUE(says(refusal(of(1, {{{0, 0, kF}, {0, 0, kB}, {0, 0, kF}}})),
                   "rank 0, cell 2 (0F0) repeats cell 0"));
}

TEST(Check, ABackwardBeforeItsForwardIsNamed) {
  EXPECT_TRUE(says(refusal(of(1, {{{0, 0, kB}, {0, 0, kF}}})),
                   "rank 0, cell 0 (0B0) comes before rank 0, cell 1 (0F0)"));
}

TEST(Check, AnInputBackwardBeforeItsForwardIsNamed) {
  EXPECT_TRUE(says(refusal(of(1, {{{0, 0, kI}, {0, 0, kF}, {0, 0, kW}}})),
                   "rank 0, cell 0 (0I0) comes before rank 0, cell 1 (0F0)"));
}

TEST(Check, AWeightBackwardBeforeItsInputBackwardIsNamed) {
  EXPECT_TRUE(says(refusal(of(1, {{{0, 0, kF}, {0, 0, kW}, {0, 0, kI}}})),
                   "rank 0, cell 1 (0W0) comes before rank 0, cell 2 (0I0)"));
}

TEST(Check, AnActionOfAnotherRanksStageIsNamedWithThatRank) {
  auto schedule = of(1, {{{0, 0, kF}, {0, 0, kB}}, {{1, 0, kF}, {1, 0, kB}}});
  schedule.actions[1].push_back({0, 0, kB});
  EXPECT_TRUE(says(refusal(schedule), "rank 1, cell 2 (0B0) is of stage 0, which is on rank 0"));
}

TEST(Check, WeightsWithoutInputsMissTheInputs) {
  EXPECT_TRUE(says(refusal(of(1, {{{0, 0, kF}, {0, 0, kW}}})), "rank 0 has no 0I0"));
}

TEST(Check, InputsWithoutWeightsMissTheWeights) {
  EXPECT_TRUE(says(refusal(of(1, {{{0, 0, kF}, {0, 0, kI}}})), "rank 0 has no 0W0"));
}

TEST(Check, AHalfBesideTheWholeBackwardIsNamed) {
  EXPECT_TRUE(says(refusal(of(1, {{{0, 0, kF}, {0, 0, kB}, {0, 0, kI}}})),
                   "rank 0, cell 2 (0I0) is part of rank 0, cell 1 (0B0)"));
  EXPECT_TRUE(says(refusal(of(1, {{{0, 0, kF}, {0, 0, kW}, {0, 0, kB}}})),
                   "rank 0, cell 1 (0W0) is part of rank 0, cell 2 (0B0)"));
}

TEST(Check, AStageOrMicrobatchBeyondTheLastIsNamed) {
  EXPECT_TRUE(says(refusal(of(1, {{{0, 0, kF}, {1, 0, kF}}})), "rank 0, cell 1 (1F0)"));
  EXPECT_TRUE(says(refusal(of(1, {{{0, 0, kF}, {0, 1, kF}}})), "rank 0, cell 1 (0F1)"));
}

}  // namespace
}  // namespace tenure::pipeline
