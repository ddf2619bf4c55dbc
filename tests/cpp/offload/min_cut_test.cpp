#include <tenure/offload/min_cut.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace tenure::offload {
namespace {

struct Edge {
  uint32_t from = 0;
  uint32_t to = 0;
  double capacity = 0;
};

double capacity_across(const std::vector<Edge>& edges, const std::vector<bool>& sinks) {
  double sum = 0;
  for (const auto& edge : edges) {
    sum += !sinks[edge.from] && sinks[edge.to] ? edge.capacity : 0;
  }
  return sum;
}

std::vector<bool> cut(size_t nodes, const std::vector<Edge>& edges, uint32_t source,
                      uint32_t sink) {
  Network network(nodes);
  for (const auto& edge : edges) {
    network.edge(edge.from, edge.to, edge.capacity);
  }
  return network.cut(source, sink);
}

// All cuts between the first node and the last.
double least_of_all(size_t nodes, const std::vector<Edge>& edges) {
  double least = 1e301;
  for (uint32_t bits = 0; bits < 1U << (nodes - 2); ++bits) {
    std::vector<bool> sinks(nodes);
    sinks[nodes - 1] = true;
    for (size_t i = 1; i + 1 < nodes; ++i) {
      sinks[i] = ((bits >> (i - 1)) & 1U) != 0;
    }
    least = std::min(least, capacity_across(edges, sinks));
  }
  return least;
}

TEST(MinCut, OfRandomNetworksIsTheLeastOfAll) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 dice(seed);
    const size_t nodes = 3 + dice() % 7;
    std::vector<Edge> edges(dice() % (nodes * nodes));
    for (auto& edge : edges) {
      edge = {.from = static_cast<uint32_t>(dice() % nodes),
              .to = static_cast<uint32_t>(dice() % nodes),
              .capacity = static_cast<double>(dice() % 100) * 1e-6};
    }
    const auto last = static_cast<uint32_t>(nodes - 1);
    const auto sinks = cut(nodes, edges, 0, last);
    EXPECT_FALSE(sinks[0]);
    EXPECT_TRUE(sinks[last]);
    EXPECT_NEAR(capacity_across(edges, sinks), least_of_all(nodes, edges), 1e-12);
  }
}

TEST(MinCut, OfEqualOnesIsTheNearestToTheSink) {
  const auto sinks = cut(4, {{0, 1, 5}, {1, 2, 5}, {2, 3, 5}}, 0, 3);
  EXPECT_EQ(sinks, (std::vector<bool>{false, false, false, true}));
}

TEST(MinCut, GoesAroundEndlessEdges) {
  const auto sinks = cut(4, {{0, 1, 0.1}, {1, 2, Network::kEndless}, {2, 3, 0.3}}, 0, 3);
  EXPECT_EQ(sinks, (std::vector<bool>{false, true, true, true}));
}

TEST(MinCut, RoundingIsNoCapacity) {
  // 0.1 + 0.2 != 0.3: nothing that counts is left of the last edge.
  const auto sinks = cut(4, {{0, 1, 0.1}, {0, 1, 0.2}, {1, 2, 0.3}, {2, 3, 1}}, 0, 3);
  EXPECT_EQ(sinks, (std::vector<bool>{false, false, true, true}));
}

TEST(MinCut, LongChainsNeedNoStack) {
  constexpr uint32_t kNodes = 200'000;
  Network network(kNodes);
  for (uint32_t i = 0; i + 1 < kNodes; ++i) {
    network.edge(i, i + 1, i == kNodes / 2 ? 1 : 2);
  }
  const auto sinks = network.cut(0, kNodes - 1);
  EXPECT_FALSE(sinks[kNodes / 2]);
  EXPECT_TRUE(sinks[kNodes / 2 + 1]);
}

}  // namespace
}  // namespace tenure::offload
