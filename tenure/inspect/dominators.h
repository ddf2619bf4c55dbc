// Dominators: what lies on every way from the roots to a node, and so what would go with it. A node
// dominates another if every way to that one leads through it. Pure functions, any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tenure::inspect {

// Who refers to whom, by number: the references of node n are edges[firsts[n]] to
// edges[firsts[n + 1]]. firsts has one more element than there are nodes.
struct Edges {
  std::span<const uint32_t> firsts;
  std::span<const uint32_t> edges;

  uint32_t nodes() const { return static_cast<uint32_t>(firsts.size()) - 1; }
  std::span<const uint32_t> of(uint32_t node) const {
    return edges.subspan(firsts[node], firsts[node + 1] - firsts[node]);
  }
};

inline constexpr uint32_t kNoDominator = ~uint32_t{0};

// The nearest dominator of each node; kNoDominator for roots, for nodes that several roots hold,
// and for nodes that none reaches.
std::vector<uint32_t> dominators(Edges graph, std::span<const uint32_t> roots);

// What would go with each node: its weight and those of all that it dominates.
std::vector<uint64_t> gone_with(std::span<const uint32_t> dominators,
                                std::span<const uint64_t> weights);

}  // namespace tenure::inspect
