#include <tenure/shard/layout.h>

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace tenure::shard {
namespace {

TEST(Layout, ParametersFollowEachOtherAligned) {
  const std::vector<uint64_t> sizes{5, 16, 1};
  const auto layout = lay_out(sizes, 2, 16);
  EXPECT_EQ(layout.parameters, (std::vector<Range>{{0, 5}, {16, 16}, {32, 1}}));
  EXPECT_EQ(layout.size, 64);
  EXPECT_EQ(layout.shard(0), (Range{0, 32}));
  EXPECT_EQ(layout.shard(1), (Range{32, 32}));
}

TEST(Layout, ARankMayHoldNothingOfAParameter) {
  const std::vector<uint64_t> sizes{5, 16, 1};
  const auto layout = lay_out(sizes, 2, 16);
  EXPECT_EQ(layout.held(0, 0), (Range{0, 5}));
  EXPECT_EQ(layout.held(0, 1).size, 0);
  EXPECT_EQ(layout.held(2, 1), (Range{0, 1}));
}

TEST(Layout, OfNothingIsEmpty) {
  const std::vector<uint64_t> none{0, 0};
  const auto layout = lay_out(none, 3, 16);
  EXPECT_EQ(layout.held(1, 2).size, 0);
  EXPECT_EQ(layout.size % 3, 0);
}

// Each element of each parameter is held by one rank, in order.
TEST(Layout, RanksHoldEachElementOnce) {
  std::mt19937 draw(0);
  for (int round = 0; round < 500; ++round) {
    std::vector<uint64_t> sizes(1 + draw() % 6);
    for (auto& size : sizes) {
      size = draw() % 70;
    }
    const uint32_t ranks = 1 + draw() % 7;
    const uint64_t alignment = 1U << (draw() % 5);
    const auto layout = lay_out(sizes, ranks, alignment);
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_EQ(layout.parameters[i].begin % alignment, 0);
      uint64_t next = 0;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const auto held = layout.held(i, rank);
        if (held.size != 0) {
          EXPECT_EQ(held.begin, next);
          next = held.end();
          const auto at = layout.parameters[i].begin + held.begin;
          EXPECT_GE(at, layout.shard(rank).begin);
          EXPECT_LE(at + held.size, layout.shard(rank).end());
        }
      }
      EXPECT_EQ(next, sizes[i]);
    }
  }
}

}  // namespace
}  // namespace tenure::shard
