#include <tenure/pipeline/paths.h>

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <iterator>

namespace tenure::pipeline {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

Paths::Paths(const edge_list& roots, const edge_list& inputs) {
  for (const auto& input : inputs) {
    on_path_[input.function.get()] = true;
  }
  for (const auto& root : roots) {
    visit(root.function.get());
  }
}

// Depth first without recursion: a node is done when all after it are.
void Paths::visit(Node* root) {
  struct Visit {
    Node* node;
    size_t next = 0;
  };
  std::vector<Visit> stack;
  const auto enter = [&](Node* node) {
    if (node != nullptr && on_path_.emplace(node, false).second) {
      nodes_.push_back(node);
      stack.push_back({node});
    }
  };
  enter(root);
  while (!stack.empty()) {
    auto& top = stack.back();
    const auto& edges = top.node->next_edges();
    if (top.next < edges.size()) {
      enter(edges[top.next++].function.get());
      continue;
    }
    const auto leads =
        std::ranges::any_of(edges, [&](const Edge& edge) { return on_path(edge.function.get()); });
    if (leads) {
      on_path_[top.node] = true;
      path_.push_back(top.node);
    }
    stack.pop_back();
  }
}

Exits exits_of(const Paths& paths) {
  Exits out;
  for (const auto* node : paths.path()) {
    c10::SmallVector<Node*, 4> own;
    for (const auto& edge : node->next_edges()) {
      auto* exit = edge.function.get();
      if (edge.is_valid() && !paths.on_path(exit) && std::ranges::find(own, exit) == own.end()) {
        own.push_back(exit);
      }
    }
    for (auto* exit : own) {
      ++out[exit];
    }
  }
  return out;
}

NodeSet reached_by(const edge_list& edges) {
  NodeSet out;
  std::vector<const Node*> todo;
  const auto enter = [&](const edge_list& next) {
    for (const auto& edge : next) {
      if (edge.is_valid() && out.insert(edge.function.get()).second) {
        todo.push_back(edge.function.get());
      }
    }
  };
  enter(edges);
  while (!todo.empty()) {
    const auto* node = todo.back();
    todo.pop_back();
    enter(node->next_edges());
  }
  return out;
}

bool exits_meet(const Exits& exits) {
  edge_list edges;
  for (const auto& [exit, count] : exits) {
    std::ranges::copy(exit->next_edges(), std::back_inserter(edges));
  }
  const auto reached = reached_by(edges);
  return std::ranges::any_of(exits,
                             [&](const auto& exit) { return reached.count(exit.first) != 0; });
}

bool waits_with(const Edge& edge, const Paths& paths, const Exits& exits) {
  auto* exit = edge.function.get();
  return exit != nullptr && !paths.on_path(exit) && exits.at(exit) == 1;
}

}  // namespace tenure::pipeline
