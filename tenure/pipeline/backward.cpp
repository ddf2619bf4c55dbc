#include <tenure/pipeline/backward.h>

#include <tenure/pipeline/node_hooks.h>
#include <tenure/pipeline/paths.h>
#include <tenure/pipeline/products.h>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

namespace tenure::pipeline {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

std::atomic<void (*)()> g_translate = nullptr;

enum class After : uint8_t { free_graph, keep_graph };
enum class Leaves : uint8_t { accumulate, capture };

variable_list execute(const edge_list& roots, const variable_list& gradients, After after,
                      Leaves leaves, const edge_list& outputs = {}) {
  try {
    return torch::autograd::Engine::get_default_engine().execute(
        roots, gradients, after == After::keep_graph, /*create_graph=*/false,
        leaves == Leaves::accumulate, outputs);
  } catch (...) {
    if (auto* translate = g_translate.load()) {
      translate();
    }
    throw;
  }
}

struct EdgeHash {
  size_t operator()(const Edge& edge) const {
    return std::hash<const void*>()(edge.function.get()) * 31 + edge.input_nr;
  }
};
struct SameEdge {
  bool operator()(const Edge& a, const Edge& b) const {
    return a.function == b.function && a.input_nr == b.input_nr;
  }
};
template <class T>
using ByEdge = std::unordered_map<Edge, T, EdgeHash, SameEdge>;

// Of an operator of ATen: neither a user's own nor one of torch's that runs other code.
bool is_generated(const Node& node) {
  static constexpr std::string_view mangled = "N5torch8autograd9generated";
  const auto& of = node;
  return std::string_view(typeid(of).name()).starts_with(mangled);
}

// Whether it makes no difference to anybody that a backward is run in two halves: the graph has
// torch's own nodes alone, which know nothing of when they run, nobody has hooked one, and what
// products read twice is there.
bool is_plain(const Paths& paths) {
  return std::ranges::all_of(paths.nodes(), [&](Node* node) {
    if (is_hooked(*node) || node->tensor_post_acc_grad_hooks() != nullptr) {
      return false;
    }
    if (!is_generated(*node)) {
      return dynamic_cast<torch::autograd::AccumulateGrad*>(node) != nullptr;
    }
    return !(is_product(*node) && reads_through_hooks(*node));
  });
}

// Whether torch refuses to run it in a half: in a reentrant checkpoint runs a backward of its own,
// which may not be where gradients are asked for and not accumulated; and what torch.compile made
// writes to what it has saved, unless the graph goes with it.
bool needs_whole(const Node& node) {
  if (is_generated(node) || typeid(node) == typeid(torch::autograd::AccumulateGrad)) {
    return false;
  }
  const auto name = node.name();
  return name == "CheckpointFunctionBackward" || name == "CompiledFunctionBackward";
}

// A node whose weights wait: its incoming gradients, and by edge whether it leads to such a weight.
struct Waiting {
  edge_list incoming;
  std::vector<Alias> gradients;
  std::vector<bool> leads_on;

  // What the first half has found is not found again, and nothing runs on from here but to weights.
  void cut() const {
    auto& edges = incoming.front().function->next_edges();
    for (size_t i = 0; i < edges.size(); ++i) {
      edges[i] = leads_on[i] ? edges[i] : Edge();
    }
  }
};

}  // namespace

struct Backward::State {
  // The first half where only products wait that run last: a backward of everything else.
  std::vector<at::Tensor> run_all_but_last(const Paths& paths, const Exits& exits,
                                           const edge_list& roots, const variable_list& gradients,
                                           OwnerId owner, ScopeId scope);

  edge_list inputs;
  edge_list outputs;  // an edge without a node: that output has no graph
  std::vector<Waiting> waiting;
  // Gradients on their way to weights: where they are and what they are. Hooks on them have run.
  edge_list settled;
  std::vector<Alias> settled_gradients;
  // The same of outputs that no input leads to.
  edge_list apart;
  std::vector<Alias> apart_gradients;
};

void install_translator(void (*translate)()) { g_translate.store(translate); }

Backward::Backward() = default;
Backward::Backward(Backward&&) noexcept = default;
Backward& Backward::operator=(Backward&&) noexcept = default;
Backward::~Backward() = default;

Backward::Backward(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs)
    : state_(std::make_unique<State>()) {
  for (const auto& input : inputs) {
    state_->inputs.push_back(input.requires_grad() ? torch::autograd::impl::gradient_edge(input)
                                                   : Edge());
  }
  for (const auto& output : outputs) {
    state_->outputs.push_back(output.requires_grad() ? torch::autograd::impl::gradient_edge(output)
                                                     : Edge());
  }
}

namespace {

struct Roots {
  edge_list edges;
  variable_list gradients;
};

Roots roots_of(const edge_list& outputs, const std::vector<at::Tensor>& gradients) {
  Roots out;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].is_valid() && gradients[i].defined()) {
      out.edges.push_back(outputs[i]);
      out.gradients.push_back(gradients[i]);
    }
  }
  return out;
}

// The gradient that the engine left at a leaf, which has none afterwards.
at::Tensor take_gradient(const Edge& leaf) {
  auto* node = dynamic_cast<torch::autograd::AccumulateGrad*>(leaf.function.get());
  if (node == nullptr) {
    return {};
  }
  auto& kept = node->variable.mutable_grad();
  auto out = kept;
  kept.reset();
  return out;
}

// Of products on the inputs' path with weights of their own, those that run last.
std::vector<Node*> last_products(const Paths& paths, const Exits& exits) {
  constexpr size_t one_of = 4;
  std::vector<Node*> out;
  std::ranges::copy_if(paths.path(), std::back_inserter(out), [&](Node* node) {
    return is_product(*node) && std::ranges::any_of(node->next_edges(), [&](const Edge& edge) {
             return waits_with(edge, paths, exits);
           });
  });
  std::ranges::sort(out, {}, &Node::sequence_nr);
  out.resize((out.size() + one_of - 1) / one_of);
  return out;
}

edge_list valid(const edge_list& edges) {
  edge_list out;
  std::ranges::copy_if(edges, std::back_inserter(out), &Edge::is_valid);
  return out;
}

}  // namespace

std::vector<at::Tensor> Backward::leaves() const {
  std::vector<at::Tensor> out;
  for (const auto* node : reached_by(state_->outputs)) {
    const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    const auto is_input = std::ranges::any_of(
        state_->inputs, [&](const Edge& input) { return input.function.get() == node; });
    if (leaf != nullptr && !is_input) {
      out.push_back(leaf->variable);
    }
  }
  return out;
}

std::vector<at::Tensor> Backward::run(const std::vector<at::Tensor>& gradients) {
  const auto state = std::move(state_);
  const auto roots = roots_of(state->outputs, gradients);
  if (!roots.edges.empty()) {
    execute(roots.edges, roots.gradients, After::free_graph, Leaves::accumulate);
  }
  std::vector<at::Tensor> out;
  for (const auto& input : state->inputs) {
    out.push_back(take_gradient(input));
  }
  return out;
}

std::vector<at::Tensor> Backward::run_inputs(const std::vector<at::Tensor>& gradients,
                                             OwnerId owner, ScopeId scope, Halves halves) {
  const auto roots = roots_of(state_->outputs, gradients);
  const auto inputs = valid(state_->inputs);
  const auto whole = [&] {
    auto out = run(gradients);
    state_ = std::make_unique<State>();
    return out;
  };
  const auto passed_by =
      std::ranges::any_of(inputs, [](const Edge& input) { return is_passed_by(*input.function); });
  if (roots.edges.empty() || inputs.empty() || passed_by) {
    return whole();
  }
  const Paths paths(roots.edges, inputs);
  const auto exits = exits_of(paths);
  const auto runs_whole = [&] {
    return halves == Halves::always
               ? std::ranges::any_of(paths.nodes(),
                                     [](const Node* node) { return needs_whole(*node); })
               : !is_plain(paths);  // what is plain has no such node
  };
  if (exits_meet(exits) || runs_whole()) {
    return whole();
  }
  if (halves == Halves::last_if_plain) {
    return state_->run_all_but_last(paths, exits, roots.edges, roots.gradients, owner, scope);
  }
  // Outputs that no input leads to are weights' alone: their gradients go on in the other half.
  Roots on_path;
  Roots apart;
  for (size_t i = 0; i < roots.edges.size(); ++i) {
    auto& into = paths.on_path(roots.edges[i].function.get()) ? on_path : apart;
    into.edges.push_back(roots.edges[i]);
    into.gradients.push_back(roots.gradients[i]);
  }
  // A hook is to see the whole gradient, once.
  const auto hook_meets = [reached = reached_by(apart.edges)](const auto& exit) {
    return reached.count(exit.first) != 0 && has_tensor_hooks(*exit.first);
  };
  if (on_path.edges.empty() || std::ranges::any_of(exits, hook_meets)) {
    return whole();
  }
  // What this half is asked for: the inputs' gradients, those of weights that do not wait, and the
  // incoming gradients of nodes whose weights do.
  auto asked = inputs;
  std::unordered_set<Edge, EdgeHash, SameEdge> settled;
  for (auto* node : paths.path()) {
    Waiting one;
    const auto waits = is_product(*node) && !is_hooked(*node);
    for (const auto& edge : node->next_edges()) {
      const auto leaves = edge.is_valid() && !paths.on_path(edge.function.get());
      one.leads_on.push_back(waits && waits_with(edge, paths, exits));
      if (leaves && !one.leads_on.back() && settled.insert(edge).second) {
        state_->settled.push_back(edge);
        asked.push_back(edge);
      }
    }
    if (std::ranges::none_of(one.leads_on, std::identity())) {
      continue;
    }
    for (uint32_t i = 0; i < node->num_inputs(); ++i) {
      one.incoming.emplace_back(node->getptr(), i);
      asked.push_back(one.incoming.back());
    }
    state_->waiting.push_back(std::move(one));
  }
  // What the path saved is not read again, but by nodes whose weights wait.
  NodeSet needed;
  for (const auto& one : state_->waiting) {
    needed.insert(one.incoming.front().function.get());
  }
  for (auto* node : paths.path()) {
    if (needed.count(node) == 0) {
      node->add_post_hook(std::make_unique<ReleaseSaved>(*node));
    }
  }
  auto found = execute(on_path.edges, on_path.gradients, After::keep_graph, Leaves::capture, asked);

  auto next = static_cast<std::ptrdiff_t>(inputs.size());
  ByEdge<at::Tensor> by_edge;
  for (; next < static_cast<std::ptrdiff_t>(asked.size()); ++next) {
    by_edge[asked[static_cast<size_t>(next)]] = std::move(found[static_cast<size_t>(next)]);
  }
  const auto kept = [&](const Edge& edge) {
    const auto& gradient = by_edge[edge];
    return gradient.defined() ? Alias(gradient, owner, scope) : Alias();
  };
  for (auto& one : state_->waiting) {
    for (const auto& edge : one.incoming) {
      one.gradients.push_back(kept(edge));
    }
  }
  for (const auto& edge : state_->settled) {
    state_->settled_gradients.push_back(kept(edge));
  }
  state_->apart = std::move(apart.edges);
  for (const auto& gradient : apart.gradients) {
    state_->apart_gradients.emplace_back(gradient, owner, scope);
  }
  for (const auto& one : state_->waiting) {  // last: other nodes of the path may go with it
    one.cut();
  }
  std::vector<at::Tensor> out;
  size_t taken = 0;
  for (const auto& input : state_->inputs) {
    out.push_back(input.is_valid() ? std::move(found[taken++]) : at::Tensor());
  }
  state_->inputs.clear();
  state_->outputs.clear();
  return out;
}

std::vector<at::Tensor> Backward::State::run_all_but_last(const Paths& paths, const Exits& exits,
                                                          const edge_list& roots,
                                                          const variable_list& gradients,
                                                          OwnerId owner, ScopeId scope) {
  struct Put {
    Edge at;            // its first input
    edge_list weights;  // its edges to them, elsewhere none
    std::shared_ptr<variable_list> given = std::make_shared<variable_list>();
  };
  std::vector<Put> off;
  edge_list later;  // that the other half takes from there
  for (auto* node : last_products(paths, exits)) {
    auto& put = off.emplace_back(Put{.at = {node->getptr(), 0}, .weights = {}});
    node->add_pre_hook(std::make_unique<KeepGiven>(put.given));
    for (auto& edge : node->next_edges()) {
      put.weights.push_back(waits_with(edge, paths, exits) ? std::exchange(edge, {}) : Edge());
      later.push_back(put.weights.back());
    }
  }
  auto runs_later = reached_by(later);
  for (const auto& put : off) {
    runs_later.insert(put.at.function.get());
  }
  for (auto* node : paths.nodes()) {
    if (is_generated(*node) && runs_later.count(node) == 0) {
      node->add_post_hook(std::make_unique<ReleaseSaved>(*node));
    }
  }
  execute(roots, gradients, After::keep_graph, Leaves::accumulate);
  for (auto& put : off) {
    auto& one = waiting.emplace_back();
    for (uint32_t i = 0; i < put.given->size(); ++i) {
      const auto& gradient = (*put.given)[i];
      one.incoming.emplace_back(put.at.function, i);
      one.gradients.push_back(gradient.defined() ? Alias(gradient, owner, scope) : Alias());
    }
    put.given->clear();
    put.at.function->next_edges() = std::move(put.weights);  // nothing else runs on from here
  }
  std::vector<at::Tensor> out;
  for (const auto& input : inputs) {
    out.push_back(take_gradient(input));
  }
  inputs.clear();
  outputs.clear();
  return out;
}

void Backward::run_weights() {
  const auto state = std::move(state_);
  Roots roots;
  const auto add = [&](edge_list& edges, std::vector<Alias>& gradients) {
    for (size_t i = 0; i < edges.size(); ++i) {
      if (gradients[i].defined()) {
        roots.edges.push_back(std::move(edges[i]));
        roots.gradients.push_back(gradients[i].tensor());
      }
    }
    gradients.clear();
  };
  for (auto& one : state->waiting) {
    add(one.incoming, one.gradients);
  }
  const WithoutTensorHooks once(state->settled);
  add(state->settled, state->settled_gradients);
  add(state->apart, state->apart_gradients);
  if (!roots.edges.empty()) {
    execute(roots.edges, roots.gradients, After::free_graph, Leaves::accumulate);
  }
}

}  // namespace tenure::pipeline
