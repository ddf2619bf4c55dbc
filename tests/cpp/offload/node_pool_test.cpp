#include <tenure/offload/node_pool.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace tenure::offload {
namespace {

using Nodes = std::vector<std::shared_ptr<int64_t>>;

Nodes take(NodePool& pool, int64_t count) {
  Nodes out;
  for (int64_t i = 0; i < count; ++i) {
    out.push_back(std::allocate_shared<int64_t>(FromPool<int64_t>(pool), i));
  }
  return out;
}

std::set<const void*> places(const Nodes& nodes) {
  std::set<const void*> out;
  for (const auto& node : nodes) {
    out.insert(node.get());
  }
  return out;
}

TEST(NodePool, NodesThatAreOutAreApart) {
  const auto pool = NodePool::make();
  const auto nodes = take(*pool, 1000);
  EXPECT_EQ(places(nodes).size(), nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    EXPECT_EQ(*nodes[i], static_cast<int64_t>(i));
  }
}

TEST(NodePool, GivesTheSameMemoryOutAgain) {
  const auto pool = NodePool::make();
  const auto before = places(take(*pool, 640));  // whole blocks
  EXPECT_EQ(places(take(*pool, 640)), before);
}

TEST(NodePool, NodesMayOutliveIt) {
  auto pool = NodePool::make();
  auto nodes = take(*pool, 100);
  pool.reset();
  EXPECT_EQ(*nodes.back(), 99);
  nodes.clear();  // under ASan: neither early nor never
}

TEST(NodePool, AnyThreadMayGiveBackWhileOneTakes) {
  auto pool = NodePool::make();
  std::vector<std::jthread> threads;
  for (int i = 0; i < 50; ++i) {
    threads.emplace_back([nodes = take(*pool, 200)]() mutable { nodes.clear(); });
  }
  pool.reset();
}

}  // namespace
}  // namespace tenure::offload
