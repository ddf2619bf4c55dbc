#include <tenure/shard/order.h>

#include <tenure/shard/life.h>

#include <gtest/gtest.h>

#include <algorithm>

namespace tenure::shard {
namespace {

using Units = std::vector<uint32_t>;

void pass(Order& order, const std::vector<Use>& uses) {
  for (const auto use : uses) {
    order.use(use);
  }
  order.end_pass();
}

const std::vector<Use> kStep{{0, Phase::forward}, {1, Phase::forward},  {1, Phase::backward},
                             {1, Phase::reduce},  {0, Phase::backward}, {0, Phase::reduce}};

TEST(Order, NothingIsKnownInTheFirstPass) {
  Order order;
  EXPECT_FALSE(order.use({0, Phase::forward}));
  EXPECT_TRUE(order.ahead(3).empty());
}

TEST(Order, TheNextPassIsExpectedToGoTheSameWay) {
  Order order;
  pass(order, kStep);
  EXPECT_FALSE(order.use(kStep[0])) << "another rank may still be in the pass before";
  EXPECT_EQ(order.ahead(2), (Units{1, 1}));
  EXPECT_TRUE(order.use(kStep[1]));
  EXPECT_TRUE(order.use(kStep[2]));
  EXPECT_EQ(order.ahead(9), (Units{0})) << "a sum of gradients needs no unit";
}

TEST(Order, NothingBehindTheEndOfABackwardIsAhead) {
  Order order;
  pass(order, {{0, Phase::forward}, {0, Phase::backward}, {0, Phase::end}, {1, Phase::backward}});
  order.use({0, Phase::forward});
  EXPECT_EQ(order.ahead(9), (Units{0}));
}

TEST(Order, AHoldNeedsNoUnitAhead) {
  Order order;
  const std::vector<Use> held{{0, Phase::hold}, {0, Phase::reduce}, {1, Phase::reduce}};
  pass(order, held);
  pass(order, held);
  EXPECT_TRUE(order.ahead(9).empty());
  EXPECT_TRUE(order.use(held[0]));
  EXPECT_FALSE(order.use({0, Phase::forward})) << "a use instead of a sum";
}

TEST(Order, APassLikeTheOneBeforeIsSureFromItsBegin) {
  Order order;
  pass(order, kStep);
  pass(order, kStep);
  EXPECT_TRUE(order.use(kStep[0]));
  EXPECT_EQ(order.changes(), 0);
}

TEST(Order, AnotherWayIsFollowedNoFurther) {
  Order order;
  pass(order, kStep);
  pass(order, kStep);
  EXPECT_TRUE(order.use({0, Phase::forward}));
  EXPECT_FALSE(order.use({2, Phase::forward}));
  EXPECT_FALSE(order.use({1, Phase::backward}));
  EXPECT_TRUE(order.ahead(1).empty());
  order.end_pass();
  EXPECT_EQ(order.changes(), 1);
  EXPECT_FALSE(order.use({0, Phase::forward}));
  EXPECT_EQ(order.ahead(1), (Units{2}));
}

TEST(Order, AShorterPassIsAnotherWay) {
  Order order;
  pass(order, kStep);
  pass(order, kStep);
  EXPECT_TRUE(order.use(kStep[0]));
  order.end_pass();
  EXPECT_EQ(order.changes(), 1);
  EXPECT_FALSE(order.use(kStep[0]));
}

TEST(Order, APassWithoutUsesChangesNothing) {
  Order order;
  pass(order, kStep);
  pass(order, kStep);
  order.end_pass();
  EXPECT_TRUE(order.use(kStep[0]));
}

TEST(Order, AProgramWithoutPassesIsNotRememberedForEver) {
  Order order;
  for (int i = 0; i < 200'000; ++i) {
    order.use({0, Phase::forward});
  }
  EXPECT_LE(order.position(), 1U << 16U);
}

TEST(Life, OnlyTheseMovesAreLegal) {
  using enum Life;
  const std::vector<std::pair<Life, Life>> legal{{sharded, gathering},
                                                 {gathering, ready},
                                                 {gathering, released},
                                                 {ready, released},
                                                 {released, gathering}};
  for (const auto from : {sharded, gathering, ready, released}) {
    for (const auto to : {sharded, gathering, ready, released}) {
      const bool listed = std::ranges::find(legal, std::pair{from, to}) != legal.end();
      EXPECT_EQ(may_become(from, to), listed) << name_of(from) << " to " << name_of(to);
    }
  }
}

}  // namespace
}  // namespace tenure::shard
