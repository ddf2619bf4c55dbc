#include <tenure/pipeline/messages.h>

#include <tenure/pipeline/csv.h>

#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace tenure::pipeline {
namespace {

constexpr Kind kF = Kind::forward;
constexpr Kind kB = Kind::backward;
constexpr Kind kI = Kind::input_backward;
constexpr Kind kW = Kind::weight_backward;

Message activations(uint32_t from_stage, uint32_t microbatch, uint32_t peer) {
  return {.cargo = Cargo::activations,
          .from_stage = from_stage,
          .to_stage = from_stage + 1,
          .microbatch = microbatch,
          .peer = peer};
}

Message gradients(uint32_t from_stage, uint32_t microbatch, uint32_t peer) {
  return {.cargo = Cargo::gradients,
          .from_stage = from_stage,
          .to_stage = from_stage - 1,
          .microbatch = microbatch,
          .peer = peer};
}

TEST(Messages, AForwardNeedsTheStageBeforeAndServesTheOneBehind) {
  const auto schedule = make_schedule("1f1b", 3, 3);
  EXPECT_EQ(needed_by(schedule, {1, 2, kF}), activations(0, 2, 0));
  EXPECT_EQ(made_by(schedule, {1, 2, kF}), activations(1, 2, 2));
}

TEST(Messages, ABackwardNeedsTheStageBehindAndServesTheOneBefore) {
  const auto schedule = make_schedule("1f1b", 3, 3);
  EXPECT_EQ(needed_by(schedule, {1, 2, kB}), gradients(2, 2, 2));
  EXPECT_EQ(made_by(schedule, {1, 2, kB}), gradients(1, 2, 0));
}

TEST(Messages, GradientsOfInputsAreSentBeforeThoseOfWeights) {
  const auto schedule = make_schedule("zb-h1", 3, 3);
  EXPECT_EQ(made_by(schedule, {1, 2, kI}), gradients(1, 2, 0));
  EXPECT_EQ(made_by(schedule, {1, 2, kW}), std::nullopt);
  EXPECT_EQ(needed_by(schedule, {1, 2, kW}), std::nullopt);
}

TEST(Messages, TheEndsOfThePipelineHaveNobodyBeyond) {
  const auto schedule = make_schedule("1f1b", 2, 2);
  EXPECT_EQ(needed_by(schedule, {0, 0, kF}), std::nullopt);
  EXPECT_EQ(made_by(schedule, {0, 0, kB}), std::nullopt);
  EXPECT_EQ(made_by(schedule, {1, 0, kF}), std::nullopt);
  EXPECT_EQ(needed_by(schedule, {1, 0, kB}), std::nullopt);
}

TEST(Messages, BetweenTwoStagesOfARankNothingIsSent) {
  const auto schedule = make_schedule("zb-v", 2, 4);  // stages 1 and 2 are on rank 1
  EXPECT_EQ(made_by(schedule, {1, 0, kF}), std::nullopt);
  EXPECT_EQ(needed_by(schedule, {2, 0, kF}), std::nullopt);
  EXPECT_EQ(made_by(schedule, {2, 0, kI}), std::nullopt);
  EXPECT_EQ(needed_by(schedule, {1, 0, kI}), std::nullopt);
}

TEST(Messages, AReceiveIsPostedOneActionAhead) {
  const auto plan = plan_messages(from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", ""), 1);
  ASSERT_EQ(plan.steps.size(), 4);
  EXPECT_EQ(plan.steps[0].post, (std::vector<Message>{activations(0, 0, 0)}))
      << "before the first action there is none";
  EXPECT_EQ(plan.steps[1].post, (std::vector<Message>{activations(0, 1, 0)}));
  EXPECT_EQ(plan.steps[2].need, activations(0, 1, 0));
  EXPECT_TRUE(plan.steps[2].post.empty());
  EXPECT_TRUE(plan.steps[3].post.empty());
  EXPECT_EQ(plan.most_posted, 1);
}

TEST(Messages, WhatIsSentEarlierIsPostedEarlierThoughItIsNeededLater) {
  const auto plan = plan_messages(from_csv("0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0", ""), 1);
  EXPECT_EQ(plan.steps[0].post, (std::vector{activations(0, 0, 0), activations(0, 1, 0)}));
  EXPECT_EQ(plan.most_posted, 2);
}

TEST(Messages, OneSlotIsEnoughIfAllIsNeededInTheOrderInWhichItIsSent) {
  EXPECT_EQ(least_send_slots(from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1", "")), 1);
}

TEST(Messages, SlotsHoldWhatIsSentBeforeWhatIsNeededFirst) {
  EXPECT_EQ(least_send_slots(from_csv("0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0", "")), 2);
  EXPECT_EQ(least_send_slots(from_csv("0F0,0F1,0F2\n1F2,1F1,1F0", "")), 3);
}

TEST(Messages, APlanHasOneSlotMoreThanItsScheduleNeeds) {
  const auto schedule = from_csv("0F0,0F1,0F2\n1F2,1F1,1F0", "");
  EXPECT_EQ(least_send_slots(schedule), 3);
  EXPECT_EQ(plan_messages(schedule, 0).send_slots, 4);
  EXPECT_EQ(plan_messages(schedule, 1).send_slots, 4);
}

TEST(Messages, ARankAloneSendsNothing) {
  const auto plan = plan_messages(make_schedule("zb-v", 1, 3), 0);
  for (const auto& step : plan.steps) {
    EXPECT_FALSE(step.need || step.send || !step.post.empty());
  }
  EXPECT_EQ(plan.most_posted, 0);
}

}  // namespace
}  // namespace tenure::pipeline
