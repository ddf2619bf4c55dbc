#include <tenure/inspect/graph.h>

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <vector>

namespace tenure::inspect {
namespace {

using Nodes = std::vector<uint32_t>;

// Objects with one letter each, and who refers to whom.
class Builder {
 public:
  Builder(std::map<char, NodeKind> kinds, std::map<char, std::vector<char>> references)
      : kinds_(std::move(kinds)), references_(std::move(references)) {}

  Builder& add(char name) {
    graph.add(kind(name), object(name));
    return *this;
  }
  Builder& expand() {
    for (auto node = graph.expand_next(); node != Graph::kNone; node = graph.expand_next()) {
      for (const auto to : references_[name(node)]) {
        graph.refer(kind(to), object(to));
      }
    }
    return *this;
  }
  Builder& begin_loose() {
    graph.begin_loose();
    return *this;
  }

  uint32_t operator[](char name) const { return graph.find(object(name)); }
  std::string names(const Nodes& nodes) const {
    std::string out;
    for (const auto node : nodes) {
      out += name(node);
    }
    return out;
  }
  std::string path(char to) const { return names(graph.retention((*this)[to]).path); }
  std::string cycle(char to) const { return names(graph.retention((*this)[to]).cycle); }

  Graph graph;

 private:
  NodeKind kind(char name) const {
    const auto found = kinds_.find(name);
    return found == kinds_.end() ? NodeKind::object : found->second;
  }
  const void* object(char name) const { return &objects_[static_cast<unsigned char>(name)]; }
  char name(uint32_t node) const {
    return static_cast<char>(static_cast<const Object*>(graph.object(node)) - objects_.data());
  }

  struct alignas(16) Object {};
  inline static std::array<Object, 128> objects_;
  std::map<char, NodeKind> kinds_;
  std::map<char, std::vector<char>> references_;
};

TEST(Graph, KindsHaveNames) {
  EXPECT_STREQ(kind_name(NodeKind::root), "root");
  EXPECT_STREQ(kind_name(NodeKind::frame), "frame");
  EXPECT_STREQ(kind_name(NodeKind::object), "object");
  EXPECT_STREQ(kind_name(NodeKind::tensor), "tensor");
  EXPECT_STREQ(kind_name(NodeKind::autograd), "autograd");
  EXPECT_STREQ(kind_name(NodeKind::storage), "storage");
}

TEST(Graph, AnObjectIsANodeOnce) {
  Graph graph;
  const int object = 0;
  EXPECT_EQ(graph.find(&object), Graph::kNone);
  const auto [node, added] = graph.add(NodeKind::root, &object);
  EXPECT_TRUE(added);
  EXPECT_EQ(graph.add(NodeKind::root, &object), std::pair(node, false));
  EXPECT_EQ(graph.find(&object), node);
  EXPECT_EQ(graph.size(), 1);
  EXPECT_EQ(graph.kind(node), NodeKind::root);
  EXPECT_EQ(graph.object(node), &object);
}

TEST(Graph, TheShortestWayIsTold) {
  Builder build({{'r', NodeKind::root}, {'s', NodeKind::storage}},
                {{'r', {'a', 'b'}}, {'a', {'c'}}, {'c', {'s'}}, {'b', {'s'}}});
  build.add('r').expand();
  EXPECT_EQ(build.path('s'), "rbs");
  EXPECT_TRUE(build.graph.retention(build['s']).reached);
  EXPECT_EQ(build.path('r'), "r");
  EXPECT_EQ(build.cycle('s'), "");
}

TEST(Graph, TheShortestWayIsFromTheNearestRoot) {
  Builder build({{'q', NodeKind::root}, {'r', NodeKind::frame}},
                {{'q', {'a'}}, {'a', {'b'}}, {'b', {'s'}}, {'r', {'b'}}});
  build.add('q').add('r').expand();
  EXPECT_EQ(build.path('s'), "rbs");
}

TEST(Graph, ReferencesAreCounted) {
  Builder build({}, {{'r', {'a', 'b', 'b'}}, {'a', {'b', 'r'}}});
  build.add('r').expand();
  EXPECT_EQ(build.graph.references(), 5);
  EXPECT_EQ(build.graph.referrers(build['b']), 3);
  EXPECT_EQ(build.graph.referrers(build['a']), 1);
  EXPECT_EQ(build.graph.referrers(build['r']), 1);
  EXPECT_EQ(build.graph.parent(build['b']), build['r']);
  EXPECT_EQ(build.graph.parent(build['r']), Graph::kNone);
}

TEST(Graph, WhoRefersToSeveralIsToldForEach) {
  Builder built({}, {{'a', {'b', 'c'}}, {'b', {'d', 'd'}}, {'c', {'b'}}});
  built.add('a').expand();
  using References = std::vector<std::pair<uint32_t, uint32_t>>;
  EXPECT_EQ(built.graph.referring_to(Nodes{built['b'], built['d']}),
            (References{{built['a'], built['b']},
                        {built['b'], built['d']},
                        {built['b'], built['d']},
                        {built['c'], built['b']}}));
  EXPECT_EQ(built.graph.referring_to(built['b']), (Nodes{built['a'], built['c']}));
}

TEST(Graph, LooseNodesAreToldFromTheOutermostHolder) {
  Builder build({}, {{'r', {'a'}}, {'x', {'y'}}, {'y', {'s', 'a'}}});
  build.add('r').expand().begin_loose().add('y').add('x').add('s').expand();
  EXPECT_TRUE(build.graph.reached(build['a']));
  EXPECT_FALSE(build.graph.reached(build['s']));
  const auto retention = build.graph.retention(build['s']);
  EXPECT_FALSE(retention.reached);
  EXPECT_EQ(build.names(retention.path), "xys");
  EXPECT_TRUE(retention.cycle.empty());
  EXPECT_EQ(build.path('a'), "ra");
}

TEST(Graph, ALooseNodeThatNobodyHoldsIsItsOwnPath) {
  Builder build({}, {});
  build.begin_loose().add('s').expand();
  EXPECT_EQ(build.path('s'), "s");
}

TEST(Graph, ACycleIsNamedInOrder) {
  Builder build({}, {{'a', {'b'}}, {'b', {'c', 's'}}, {'c', {'d'}}, {'d', {'a'}}});
  build.begin_loose().add('s').add('d').add('c').add('b').add('a').expand();
  EXPECT_EQ(build.path('s'), "bs");
  EXPECT_EQ(build.cycle('s'), "bcda");
}

TEST(Graph, TheShortestCycleIsNamed) {
  Builder build({}, {{'a', {'b', 'x'}}, {'b', {'c'}}, {'c', {'d', 'a'}}, {'d', {'a'}}});
  build.begin_loose().add('a').expand();
  EXPECT_EQ(build.path('x'), "ax");
  EXPECT_EQ(build.cycle('x'), "abc");
}

TEST(Graph, ACycleFurtherOutIsFound) {
  Builder build({}, {{'a', {'b'}}, {'b', {'a', 'x'}}, {'x', {'y'}}, {'y', {'s'}}});
  build.begin_loose().add('s').add('y').add('x').add('b').add('a').expand();
  EXPECT_EQ(build.path('s'), "bxys");
  EXPECT_EQ(build.cycle('s'), "ba");
}

TEST(Graph, ATensorAndItsObjectAreNoCycle) {
  Builder build({{'t', NodeKind::tensor}, {'s', NodeKind::storage}},
                {{'w', {'t'}}, {'t', {'w', 's'}}});
  build.begin_loose().add('w').add('t').expand();
  const auto retention = build.graph.retention(build['s']);
  EXPECT_TRUE(retention.cycle.empty());
  EXPECT_EQ(build.names(retention.path), "wts");
}

TEST(Graph, TheHolderOfATensorsObjectIsOnThePath) {
  Builder build({{'t', NodeKind::tensor}, {'s', NodeKind::storage}},
                {{'x', {'w'}}, {'w', {'t'}}, {'t', {'w', 's'}}});
  build.begin_loose().add('s').add('t').add('w').add('x').expand();
  EXPECT_EQ(build.path('s'), "xwts");
  EXPECT_EQ(build.cycle('s'), "");
}

TEST(Graph, TwoObjectsThatHoldEachOtherAreACycle) {
  Builder build({}, {{'a', {'b'}}, {'b', {'a', 's'}}});
  build.begin_loose().add('a').expand();
  EXPECT_EQ(build.cycle('s'), "ba");
}

// module.hook -> closure -> wrapper <-> tensor -> storage, and the closure is held by the wrapper.
TEST(Graph, ACycleThroughATensorsObjectIsNamedWithoutThePair) {
  Builder build({{'t', NodeKind::tensor}, {'s', NodeKind::storage}},
                {{'w', {'t', 'c'}}, {'c', {'w'}}, {'t', {'w', 's'}}});
  build.begin_loose().add('w').add('c').add('t').expand();
  const auto retention = build.graph.retention(build['s']);
  EXPECT_EQ(build.names(retention.path), "wts");
  EXPECT_EQ(build.names(retention.cycle), "wc");
}

TEST(Graph, ACycleThroughTheTensorAndItsObjectIsNamedWhole) {
  Builder build({{'t', NodeKind::tensor}, {'g', NodeKind::autograd}},
                {{'w', {'t'}}, {'t', {'w', 'g'}}, {'g', {'f', 's'}}, {'f', {'w'}}});
  build.begin_loose().add('w').expand();
  EXPECT_EQ(build.path('s'), "gs");
  EXPECT_EQ(build.cycle('s'), "gfwt");
}

TEST(Graph, LooseNodesThatHoldReachedOnesAreNotOnTheirPath) {
  Builder build({}, {{'r', {'a'}}, {'a', {'b'}}, {'x', {'a', 'y'}}, {'y', {'x'}}});
  build.add('r').expand().begin_loose().add('x').expand();
  EXPECT_EQ(build.path('b'), "rab");
  EXPECT_EQ(build.cycle('y'), "yx");
}

TEST(Graph, AListOfItemsHasAllLabelsBehindIt) {
  Builder build({}, {{'r', {'l', 'o'}}, {'l', {'1', '2', '3'}}, {'o', {'4'}}});
  build.add('r').expand();
  const Nodes nodes{build['1'], build['2'], build['3'], build['4']};
  const std::vector<uint64_t> steps{10, 11, 11, 12};
  const auto path = build.graph.retention(build['1']).path;
  EXPECT_EQ(build.names(path), "rl1");
  EXPECT_EQ(build.graph.labels_behind(path, nodes, steps), (Nodes{3, 2, 1}));
}

TEST(Graph, AChainHasFewerLabelsBehindEachLink) {
  Builder build({}, {{'r', {'a'}}, {'a', {'1', 'b'}}, {'b', {'2', 'c'}}, {'c', {'3'}}});
  build.add('r').expand();
  const Nodes nodes{build['1'], build['2'], build['3']};
  const std::vector<uint64_t> steps{10, 11, 12};
  const auto path = build.graph.retention(build['3']).path;
  EXPECT_EQ(build.names(path), "rabc3");
  EXPECT_EQ(build.graph.labels_behind(path, nodes, steps), (Nodes{3, 3, 2, 1, 1}));
}

TEST(Graph, ManyNodesKeepTheirNumbersAndAreFound) {
  constexpr uint32_t kMany = 300'000;
  const std::vector<std::array<char, 16>> objects(kMany);
  Graph graph;
  graph.add(NodeKind::root, objects.data());
  uint32_t next = 1;
  for (auto node = graph.expand_next(); node != Graph::kNone; node = graph.expand_next()) {
    if (next < kMany) {
      graph.refer(NodeKind::object, &objects[next++]);
    }
  }
  ASSERT_EQ(graph.size(), kMany);
  for (uint32_t i = 0; i < kMany; ++i) {
    ASSERT_EQ(graph.find(&objects[i]), i);
  }
  EXPECT_EQ(graph.retention(kMany - 1).path.size(), kMany);
}

TEST(Graph, ALongLooseChainNeedsNoDeepStack) {
  constexpr uint32_t kMany = 300'000;
  const std::vector<std::array<char, 16>> objects(kMany);
  Graph graph;
  graph.begin_loose();
  graph.add(NodeKind::object, objects.data());
  for (auto node = graph.expand_next(); node != Graph::kNone; node = graph.expand_next()) {
    graph.refer(NodeKind::object, &objects[(node + 1) % kMany]);
  }
  EXPECT_EQ(graph.retention(kMany / 2).cycle.size(), kMany);
}

// r holds the list l with a and b; b is held by f too. x and y hold each other and keep s.
Builder held_and_cyclic() {
  Builder built({{'r', NodeKind::root}, {'f', NodeKind::frame}, {'s', NodeKind::storage}},
                {{'r', {'l'}},
                 {'f', {'b'}},
                 {'l', {'a', 'b'}},
                 {'x', {'y'}},
                 {'y', {'x', 's'}},
                 {'u', {'t'}}});
  built.add('r').add('f').expand().begin_loose().add('x').add('u').expand();
  return built;
}

TEST(Graph, DominatorsAreOfWhatARootReaches) {
  const auto built = held_and_cyclic();
  const auto& found = built.graph.dominators();
  EXPECT_EQ(found.size(), 5U);
  EXPECT_EQ(found[built['a']], built['l']);
  EXPECT_EQ(found[built['l']], built['r']);
  EXPECT_EQ(found[built['b']], Graph::kNone);
}

TEST(Graph, CyclesWithWhatTheyKeep) {
  const auto built = held_and_cyclic();
  std::vector<uint64_t> weights(built.graph.size(), 0);
  EXPECT_TRUE(built.graph.cycles(weights, 8).empty());
  weights[built['s']] = 100;
  weights[built['t']] = 1000;  // loose, and in no cycle
  const auto found = built.graph.cycles(weights, 8);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].weight, 100U);
  EXPECT_EQ(found[0].nodes.size(), 2U);
  EXPECT_TRUE(built.graph.cycles(weights, 0).empty());
}

TEST(Graph, TheNearestOfTwoCyclesKeepsIt) {
  Builder built({{'s', NodeKind::storage}, {'t', NodeKind::storage}},
                {{'a', {'b'}}, {'b', {'a', 'c', 't'}}, {'c', {'d'}}, {'d', {'c', 's'}}});
  built.begin_loose().add('a').expand();
  std::vector<uint64_t> weights(built.graph.size(), 0);
  weights[built['s']] = 10;
  weights[built['t']] = 7;
  const auto found = built.graph.cycles(weights, 8);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].weight, 10U);
  EXPECT_EQ(found[1].weight, 7U);
}

TEST(Graph, BeginningsAreVariables) {
  Builder built({{'f', NodeKind::frame}, {'r', NodeKind::root}}, {{'f', {'v'}},
                                                                  {'v', {'w'}},
                                                                  {'w', {'x'}},
                                                                  {'r', {'m'}},
                                                                  {'m', {'d'}},
                                                                  {'d', {'g'}},
                                                                  {'g', {'h'}}});
  built.add('f').add('r').expand();
  const auto found = built.graph.beginnings();
  EXPECT_EQ(found[built['x']], built['v']);
  EXPECT_EQ(found[built['v']], built['v']);
  EXPECT_EQ(found[built['h']], built['g']);
}

}  // namespace
}  // namespace tenure::inspect
