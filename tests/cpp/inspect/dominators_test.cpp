#include <tenure/inspect/dominators.h>

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace tenure::inspect {
namespace {

using Lists = std::vector<std::vector<uint32_t>>;

struct Flat {
  explicit Flat(const Lists& lists) {
    for (const auto& list : lists) {
      edges.insert(edges.end(), list.begin(), list.end());
      firsts.push_back(static_cast<uint32_t>(edges.size()));
    }
  }
  Edges view() const { return {firsts, edges}; }
  std::vector<uint32_t> firsts{0}, edges;
};

std::vector<uint32_t> dominators_of(const Lists& lists, const std::vector<uint32_t>& roots) {
  return dominators(Flat(lists).view(), roots);
}

constexpr auto none = kNoDominator;

TEST(Dominators, AChainIsDominatedLinkByLink) {
  EXPECT_EQ(dominators_of({{1}, {2}, {}}, {0}), (std::vector<uint32_t>{none, 0, 1}));
}

TEST(Dominators, WhereTwoWaysMeetTheirForkDominates) {
  EXPECT_EQ(dominators_of({{1, 2}, {3}, {3}, {4}, {}}, {0}),
            (std::vector<uint32_t>{none, 0, 0, 0, 3}));
}

TEST(Dominators, WhatTwoRootsHoldNobodyDominates) {
  EXPECT_EQ(dominators_of({{2}, {2}, {3}, {}}, {0, 1}),
            (std::vector<uint32_t>{none, none, none, 2}));
}

TEST(Dominators, WhatNoRootReachesHasNone) {
  EXPECT_EQ(dominators_of({{1}, {}, {1, 3}, {2}}, {0}),
            (std::vector<uint32_t>{none, 0, none, none}));
}

TEST(Dominators, NoNodesAndNoRoots) {
  EXPECT_TRUE(dominators_of({}, {}).empty());
  EXPECT_EQ(dominators_of({{}}, {}), std::vector<uint32_t>{none});
}

TEST(Dominators, ALongChainNeedsNoStack) {
  constexpr uint32_t length = 300'000;
  Lists chain(length);
  for (uint32_t i = 0; i + 1 < length; ++i) {
    chain[i] = {i + 1};
  }
  const auto found = dominators_of(chain, {0});
  EXPECT_EQ(found.back(), length - 2);
  EXPECT_EQ(gone_with(found, std::vector<uint64_t>(length, 1)).front(), length);
}

// The definition: x dominates y if y cannot be reached without x.
std::set<uint32_t> reached(const Lists& lists, const std::vector<uint32_t>& roots,
                           uint32_t without) {
  std::set<uint32_t> seen;
  std::vector<uint32_t> open(roots.begin(), roots.end());
  while (!open.empty()) {
    const auto node = open.back();
    open.pop_back();
    if (node != without && seen.insert(node).second) {
      open.insert(open.end(), lists[node].begin(), lists[node].end());
    }
  }
  return seen;
}

TEST(Dominators, RandomGraphsAsDefined) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    const uint32_t size = 2 + random() % 10;
    Lists lists(size);
    for (auto edges = random() % (size_t{3} * size); edges > 0; --edges) {
      lists[random() % size].push_back(static_cast<uint32_t>(random() % size));
    }
    const std::vector<uint32_t> roots{0, static_cast<uint32_t>(random() % size)};
    const auto found = dominators_of(lists, roots);
    const auto gone = gone_with(found, std::vector<uint64_t>(size, 1));
    const auto all = reached(lists, roots, none);
    for (const auto node : all) {
      EXPECT_EQ(gone[node], all.size() - reached(lists, roots, node).size()) << round;
      for (uint32_t above = 0; above < size; ++above) {
        std::set<uint32_t> chain;
        for (auto at = found[node]; at != none; at = found[at]) {
          chain.insert(at);
        }
        const bool needed = above != node && !reached(lists, roots, above).contains(node);
        EXPECT_EQ(chain.contains(above), needed && all.contains(above)) << round;
      }
    }
  }
}

}  // namespace
}  // namespace tenure::inspect
