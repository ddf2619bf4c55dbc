#include <tenure/inspect/graph.h>

#include <tenure/inspect/dominators.h>

#include <algorithm>
#include <deque>
#include <unordered_map>
#include <unordered_set>

namespace tenure::inspect {

const char* kind_name(NodeKind kind) {
  switch (kind) {
    case NodeKind::root:
      return "root";
    case NodeKind::frame:
      return "frame";
    case NodeKind::object:
      return "object";
    case NodeKind::tensor:
      return "tensor";
    case NodeKind::autograd:
      return "autograd";
    case NodeKind::storage:
      return "storage";
  }
  return "object";
}

Graph::Graph() : slots_(size_t{1} << 16, kNone) {}

size_t Graph::slot_of(const void* object) const {
  const auto mask = slots_.size() - 1;
  auto slot = ((reinterpret_cast<uintptr_t>(object) >> 4) * 0x9E3779B97F4A7C15ULL >> 20) & mask;
  while (slots_[slot] != kNone && objects_[slots_[slot]] != object) {
    slot = (slot + 1) & mask;
  }
  return slot;
}

void Graph::grow() {
  slots_.assign(slots_.size() * 2, kNone);
  for (uint32_t node = 0; node < size(); ++node) {
    slots_[slot_of(objects_[node])] = node;
  }
}

std::pair<uint32_t, bool> Graph::add(NodeKind kind, const void* object) {
  if (size() * size_t{2} >= slots_.size()) {
    grow();
  }
  auto& slot = slots_[slot_of(object)];
  if (slot != kNone) {
    return {slot, false};
  }
  slot = size();
  kinds_.push_back(kind);
  objects_.push_back(object);
  parents_.push_back(kNone);
  referrers_.push_back(0);
  return {slot, true};
}

uint32_t Graph::find(const void* object) const { return slots_[slot_of(object)]; }

uint32_t Graph::expand_next() {
  const auto next = static_cast<uint32_t>(firsts_.size());
  if (next >= size()) {
    return kNone;
  }
  firsts_.push_back(static_cast<uint32_t>(edges_.size()));
  return next;
}

void Graph::refer(NodeKind kind, const void* object) {
  const auto [node, added] = add(kind, object);
  if (added) {
    parents_[node] = static_cast<uint32_t>(firsts_.size() - 1);
  }
  ++referrers_[node];
  edges_.push_back(node);
}

// Tarjan's components without recursion, on the nodes that no root reaches.
const Graph::Loose& Graph::loose() const {
  if (loose_made_) {
    return loose_;
  }
  loose_made_ = true;
  const auto begin = std::min(first_loose_, size());
  const auto count = size() - begin;
  const auto first_of = [&](uint32_t node) { return firsts_[node]; };

  loose_.first_referrer.assign(count + 1, 0);
  for (auto node = begin; node < size(); ++node) {
    for (auto edge = first_of(node); edge < end_of(node); ++edge) {
      if (edges_[edge] >= begin) {
        ++loose_.first_referrer[edges_[edge] - begin + 1];
      }
    }
  }
  for (uint32_t i = 0; i < count; ++i) {
    loose_.first_referrer[i + 1] += loose_.first_referrer[i];
  }
  loose_.referrers.resize(loose_.first_referrer[count]);
  auto filled = loose_.first_referrer;
  for (auto node = begin; node < size(); ++node) {
    for (auto edge = first_of(node); edge < end_of(node); ++edge) {
      if (edges_[edge] >= begin) {
        loose_.referrers[filled[edges_[edge] - begin]++] = node;
      }
    }
  }

  std::vector<uint32_t> order(count, kNone);
  std::vector<uint32_t> low(count, 0);
  std::vector<uint32_t> pending;
  std::vector<std::pair<uint32_t, uint32_t>> calls;  // node, next edge
  std::vector<bool> on_stack(count, false);
  loose_.component.assign(count, kNone);
  uint32_t clock = 0;
  for (uint32_t start = 0; start < count; ++start) {
    if (order[start] != kNone) {
      continue;
    }
    calls.emplace_back(start, first_of(begin + start));
    while (!calls.empty()) {
      auto& [node, edge] = calls.back();
      if (order[node] == kNone) {
        order[node] = low[node] = clock++;
        pending.push_back(node);
        on_stack[node] = true;
      }
      if (edge < end_of(begin + node)) {
        const auto target = edges_[edge++];
        if (target < begin) {
          continue;
        }
        const auto to = target - begin;
        if (order[to] == kNone) {
          calls.emplace_back(to, first_of(target));
        } else if (on_stack[to]) {
          low[node] = std::min(low[node], order[to]);
        }
        continue;
      }
      if (low[node] == order[node]) {
        const auto number = static_cast<uint32_t>(loose_.cyclic.size());
        std::vector<uint32_t> members;
        do {
          members.push_back(pending.back());
          pending.pop_back();
          on_stack[members.back()] = false;
          loose_.component[members.back()] = number;
        } while (members.back() != node);
        const bool pair = members.size() == 2 && is_pair(begin + members[0], begin + members[1]);
        const auto own = std::span(edges_).subspan(first_of(begin + node),
                                                   end_of(begin + node) - first_of(begin + node));
        const bool itself = std::ranges::find(own, begin + node) != own.end();
        loose_.cyclic.push_back((members.size() > 1 && !pair) || itself);
      }
      const auto done = node;
      calls.pop_back();
      if (!calls.empty()) {
        auto& above = low[calls.back().first];
        above = std::min(above, low[done]);
      }
    }
  }
  return loose_;
}

std::vector<uint32_t> Graph::referring_to(uint32_t node) const {
  std::vector<uint32_t> out;
  for (const auto& [from, to] : referring_to(std::span(&node, 1))) {
    out.push_back(from);
  }
  return out;
}

std::vector<std::pair<uint32_t, uint32_t>> Graph::referring_to(
    std::span<const uint32_t> nodes) const {
  std::vector<bool> wanted(size(), false);
  for (const auto node : nodes) {
    wanted[node] = true;
  }
  std::vector<std::pair<uint32_t, uint32_t>> out;
  for (uint32_t from = 0; from < firsts_.size(); ++from) {
    for (auto edge = firsts_[from]; edge < end_of(from); ++edge) {
      if (wanted[edges_[edge]]) {
        out.emplace_back(from, edges_[edge]);
      }
    }
  }
  return out;
}

Retention Graph::retention(uint32_t node) const {
  Retention out;
  if (reached(node)) {
    out.reached = true;
    for (auto at = node; at != kNone; at = parents_[at]) {
      out.path.push_back(at);
    }
    std::ranges::reverse(out.path);
    return out;
  }
  // Backwards from the node to the nearest cycle, or else to the outermost object there is.
  const auto& graph = loose();
  const auto begin = first_loose_;
  std::unordered_map<uint32_t, uint32_t> towards{{node, kNone}};
  std::deque<uint32_t> queue{node};
  auto top = node;
  while (!queue.empty()) {
    top = queue.front();
    queue.pop_front();
    if (graph.cyclic[graph.component[top - begin]]) {
      break;
    }
    const auto last = graph.first_referrer[top - begin + 1];
    for (auto i = graph.first_referrer[top - begin]; i < last; ++i) {
      if (towards.emplace(graph.referrers[i], top).second) {
        queue.push_back(graph.referrers[i]);
      }
    }
  }
  for (auto at = top; at != kNone; at = towards[at]) {
    out.path.push_back(at);
  }
  if (!graph.cyclic[graph.component[top - begin]]) {
    return out;
  }
  out.cycle = cycle_near(top);
  if (!out.cycle.empty() && out.cycle.front() != top) {
    out.path.insert(out.path.begin(), out.cycle.front());
  }
  return out;
}

std::vector<uint32_t> Graph::cycle_near(uint32_t top) const {
  auto found = cycle_through(top);
  const auto& graph = loose();
  const auto last = graph.first_referrer[top - first_loose_ + 1];
  for (auto i = graph.first_referrer[top - first_loose_]; i < last && found.empty(); ++i) {
    if (is_pair(top, graph.referrers[i])) {
      found = cycle_through(graph.referrers[i]);
    }
  }
  return found;
}

// The shortest way from `top` back to itself, found backwards within its component.
std::vector<uint32_t> Graph::cycle_through(uint32_t top) const {
  const auto& graph = loose();
  const auto begin = first_loose_;
  std::unordered_map<uint32_t, uint32_t> next;
  std::deque<uint32_t> queue{top};
  while (!queue.empty()) {
    const auto at = queue.front();
    queue.pop_front();
    const auto last = graph.first_referrer[at - begin + 1];
    for (auto i = graph.first_referrer[at - begin]; i < last; ++i) {
      const auto from = graph.referrers[i];
      const bool back = next.contains(at) && next[at] == from && is_pair(from, at);
      if (graph.component[from - begin] != graph.component[top - begin] || back ||
          !next.emplace(from, at).second) {
        continue;
      }
      if (from == top) {
        std::vector<uint32_t> cycle{top};
        for (auto step = next[top]; step != top; step = next[step]) {
          cycle.push_back(step);
        }
        return cycle;
      }
      queue.push_back(from);
    }
  }
  return {};
}

std::vector<Cycle> Graph::cycles(std::span<const uint64_t> weights, size_t most) const {
  const auto& graph = loose();
  const auto begin = std::min(first_loose_, size());
  // From all cycles at once, breadth first: a node belongs to the one that is nearest.
  std::vector<uint32_t> nearest(size() - begin, kNone);
  std::vector<uint64_t> kept(graph.cyclic.size(), 0);
  std::vector<uint32_t> member(graph.cyclic.size(), kNone);
  std::vector<uint32_t> queue;
  const auto reach = [&](uint32_t node, uint32_t component) {
    if (nearest[node - begin] == kNone) {
      nearest[node - begin] = component;
      kept[component] += weights[node];
      queue.push_back(node);
    }
  };
  for (auto node = begin; node < size(); ++node) {
    const auto component = graph.component[node - begin];
    if (graph.cyclic[component]) {
      member[component] = std::min(member[component], node);
      reach(node, component);
    }
  }
  for (size_t next = 0; next < queue.size(); ++next) {  // NOLINT(modernize-loop-convert): it grows
    const auto node = queue[next];
    for (auto edge = firsts_[node]; edge < end_of(node); ++edge) {
      if (edges_[edge] >= begin) {
        reach(edges_[edge], nearest[node - begin]);
      }
    }
  }
  std::vector<uint32_t> heaviest;
  for (uint32_t component = 0; component < kept.size(); ++component) {
    if (kept[component] > 0) {
      heaviest.push_back(component);
    }
  }
  std::ranges::sort(heaviest, [&](auto a, auto b) { return kept[a] > kept[b]; });
  heaviest.resize(std::min(heaviest.size(), most));
  std::vector<Cycle> out;
  for (const auto component : heaviest) {
    out.push_back({.nodes = cycle_near(member[component]), .weight = kept[component]});
  }
  return out;
}

const std::vector<uint32_t>& Graph::dominators() const {
  if (dominators_.empty()) {
    const auto reachable = std::min(first_loose_, size());
    std::vector<uint32_t> roots;
    for (uint32_t node = 0; node < reachable; ++node) {
      if (parents_[node] == kNone) {
        roots.push_back(node);
      }
    }
    std::vector<uint32_t> firsts(firsts_.begin(), firsts_.begin() + reachable);
    firsts.push_back(reachable == 0 ? 0 : end_of(reachable - 1));
    dominators_ = inspect::dominators({firsts, edges_}, roots);
  }
  return dominators_;
}

bool Graph::dominates(uint32_t node, uint32_t other) const {
  for (auto at = other; at != kNone; at = dominators()[at]) {
    if (at == node) {
      return true;
    }
  }
  return false;
}

std::vector<uint32_t> Graph::references_from_outside(std::span<const uint32_t> nodes) const {
  std::unordered_map<uint32_t, uint32_t> counts;
  for (const auto node : nodes) {
    counts.emplace(node, 0);
  }
  const auto reachable = std::min(first_loose_, size());
  for (uint32_t from = 0; from < reachable; ++from) {
    for (auto edge = firsts_[from]; edge < end_of(from); ++edge) {
      const auto found = counts.find(edges_[edge]);
      if (found != counts.end() && !dominates(edges_[edge], from)) {
        ++found->second;
      }
    }
  }
  std::vector<uint32_t> out;
  for (const auto node : nodes) {
    out.push_back(counts[node]);
  }
  return out;
}

std::vector<uint32_t> Graph::labels_behind(std::span<const uint32_t> path,
                                           std::span<const uint32_t> nodes,
                                           std::span<const uint64_t> labels) const {
  // The deepest element of the path that the way to each node leads through. A node is added after
  // the one that it was found from, so one pass suffices however long the ways are.
  constexpr auto nowhere = ~size_t{0};
  std::vector<size_t> place(size(), nowhere);
  for (size_t i = 0; i < path.size(); ++i) {
    place[path[i]] = i;
  }
  for (uint32_t node = 0; node < size(); ++node) {
    if (place[node] == nowhere && parents_[node] != kNone) {
      place[node] = place[parents_[node]];
    }
  }
  // A way that leads through an element leads through all before it.
  std::vector<std::vector<uint64_t>> met(path.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (place[nodes[i]] != nowhere) {
      met[place[nodes[i]]].push_back(labels[i]);
    }
  }
  std::vector<uint32_t> out(path.size());
  std::unordered_set<uint64_t> seen;
  for (size_t i = path.size(); i-- > 0;) {
    seen.insert(met[i].begin(), met[i].end());
    out[i] = static_cast<uint32_t>(seen.size());
  }
  return out;
}

std::vector<uint32_t> Graph::beginnings() const {
  const auto reachable = std::min(first_loose_, size());
  std::vector<uint32_t> out(reachable);
  std::vector<uint8_t> left(reachable);  // elements of the beginning that are still to come
  for (uint32_t node = 0; node < reachable; ++node) {
    const auto parent = parents_[node];
    if (parent == kNone) {
      out[node] = node;
      left[node] = kind(node) == NodeKind::frame ? 1 : 3;
      continue;
    }
    out[node] = left[parent] > 0 ? node : out[parent];
    left[node] = left[parent] > 0 ? left[parent] - 1 : 0;
  }
  return out;
}

}  // namespace tenure::inspect
