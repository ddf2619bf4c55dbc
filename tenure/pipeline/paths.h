// Paths: which nodes of a backward's graph lie on the way to its inputs, and where the others
// begin. Pure, while nobody runs or changes the graph; any thread.
#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <vector>

namespace tenure::pipeline {

// A backward is walked through for each microbatch: these take no memory for each element.
template <class T>
using ByNode = ska::flat_hash_map<const torch::autograd::Node*, T>;
using NodeSet = ska::flat_hash_set<const torch::autograd::Node*>;

// The graph from `roots`, and which of its nodes lie on the inputs' path.
class Paths {
 public:
  Paths(const torch::autograd::edge_list& roots, const torch::autograd::edge_list& inputs);

  bool on_path(const torch::autograd::Node* node) const {
    const auto known = on_path_.find(node);
    return known != on_path_.end() && known->second;
  }
  // Nodes of the path, inputs' own excepted.
  const std::vector<torch::autograd::Node*>& path() const { return path_; }
  // These, and all that lead to weights.
  const std::vector<torch::autograd::Node*>& nodes() const { return nodes_; }

 private:
  void visit(torch::autograd::Node* root);

  ByNode<bool> on_path_;  // of all that have been seen
  std::vector<torch::autograd::Node*> nodes_;
  std::vector<torch::autograd::Node*> path_;
};

// The nodes to which the path is left, with how many nodes of the path lead to each.
using Exits = ska::flat_hash_map<torch::autograd::Node*, int>;
Exits exits_of(const Paths& paths);
// Whether one exit leads to another: then a gradient kept at the second would have that of the
// first in it, and running on from both would count it twice.
bool exits_meet(const Exits& exits);

// All nodes to which edges lead, however far.
NodeSet reached_by(const torch::autograd::edge_list& edges);

// Whether an edge of a product leads to weights that can wait.
bool waits_with(const torch::autograd::Edge& edge, const Paths& paths, const Exits& exits);

}  // namespace tenure::pipeline
