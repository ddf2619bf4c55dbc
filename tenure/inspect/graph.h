// Graph: who refers to whom, from roots to storages, as numbers. Torch-free: what the objects are
// is the builder's business (python/bindings/reference_graph.cpp). Built once, breadth first, and
// then asked; one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace tenure::inspect {

enum class NodeKind : uint8_t { root, frame, object, tensor, autograd, storage };
const char* kind_name(NodeKind kind);

// How a node is kept alive.
struct Retention {
  bool reached = false;         // path begins at a root
  std::vector<uint32_t> path;   // from the root, or from the cycle or the outermost holder known
  std::vector<uint32_t> cycle;  // if path begins in one: its nodes in order
};

// Nodes that hold each other and that no root reaches.
struct Cycle {
  std::vector<uint32_t> nodes;  // one way around
  uint64_t weight = 0;          // of all that it keeps, and no other cycle that is nearer
};

class Graph {
 public:
  static constexpr uint32_t kNone = ~uint32_t{0};

  Graph();

  // The number of the object, and whether it is new. A new one's parent is the node that is being
  // expanded, or nobody.
  std::pair<uint32_t, bool> add(NodeKind kind, const void* object);
  // kNone if it is not there.
  uint32_t find(const void* object) const;

  // Breadth first: expand_next() names the node whose references are to be added with refer(), in
  // order, until there is none.
  uint32_t expand_next();
  void refer(NodeKind kind, const void* object);
  // What is added from now on is not reached from any root.
  void begin_loose() { first_loose_ = size(); }

  uint32_t size() const { return static_cast<uint32_t>(kinds_.size()); }
  size_t references() const { return edges_.size(); }
  NodeKind kind(uint32_t node) const { return kinds_[node]; }
  const void* object(uint32_t node) const { return objects_[node]; }
  uint32_t parent(uint32_t node) const { return parents_[node]; }
  bool reached(uint32_t node) const { return node < first_loose_; }
  // How many references of the graph lead to it.
  uint32_t referrers(uint32_t node) const { return referrers_[node]; }

  // The nodes that refer to this one. Looks at every reference.
  std::vector<uint32_t> referring_to(uint32_t node) const;
  // The same for several: who refers to which of them.
  std::vector<std::pair<uint32_t, uint32_t>> referring_to(std::span<const uint32_t> nodes) const;

  // The shortest way.
  Retention retention(uint32_t node) const;

  // The nearest dominator of each node that a root reaches; see dominators.h.
  const std::vector<uint32_t>& dominators() const;

  // Whether a node dominates another that a root reaches. Each dominates itself.
  bool dominates(uint32_t node, uint32_t other) const;
  // For each of `nodes`, how many references lead to it from outside: from what it does not
  // dominate. If there is one, the node goes with that reference.
  std::vector<uint32_t> references_from_outside(std::span<const uint32_t> nodes) const;

  // The cycles that keep anything of weight, the heaviest first and at most so many.
  std::vector<Cycle> cycles(std::span<const uint64_t> weights, size_t most) const;

  // What the way to each node begins with: the variable of a frame (frame, value) or of a module
  // (modules, module, its dict, value), by its last element. For the nodes that a root reaches.
  std::vector<uint32_t> beginnings() const;

  // How many different labels the `nodes` have whose shortest way leads through each element of
  // `path`, itself the way to one of them.
  std::vector<uint32_t> labels_behind(std::span<const uint32_t> path,
                                      std::span<const uint32_t> nodes,
                                      std::span<const uint64_t> labels) const;

 private:
  void grow();
  size_t slot_of(const void* object) const;

  // What is only needed for nodes that no root reaches, made when first asked for.
  struct Loose {
    std::vector<uint32_t> first_referrer, referrers;  // as firsts_ and edges_, backwards
    std::vector<uint32_t> component;                  // strongly connected, by node - first_loose_
    std::vector<bool> cyclic;                         // by component
  };
  const Loose& loose() const;
  uint32_t end_of(uint32_t node) const {  // of its references in edges_
    return node + 1 < firsts_.size() ? firsts_[node + 1] : static_cast<uint32_t>(edges_.size());
  }
  std::vector<uint32_t> cycle_through(uint32_t top) const;
  // The shortest one through `top`, or if there is none through the other half of its pair.
  std::vector<uint32_t> cycle_near(uint32_t top) const;
  // A tensor and the object that it is in Python hold each other, which is no cycle of anyone's.
  bool is_pair(uint32_t a, uint32_t b) const {
    return (kind(a) == NodeKind::tensor && kind(b) == NodeKind::object) ||
           (kind(a) == NodeKind::object && kind(b) == NodeKind::tensor);
  }

  std::vector<NodeKind> kinds_;
  std::vector<const void*> objects_;
  std::vector<uint32_t> parents_;
  std::vector<uint32_t> referrers_;
  std::vector<uint32_t> firsts_;  // of a node's references in edges_; nodes are expanded in order
  std::vector<uint32_t> edges_;
  std::vector<uint32_t> slots_;  // open addressing, by object
  uint32_t first_loose_ = kNone;
  mutable Loose loose_;
  mutable bool loose_made_ = false;
  mutable std::vector<uint32_t> dominators_;  // empty until first asked for
};

}  // namespace tenure::inspect
