// Dinic's algorithm. Distances are counted from the sink: what cannot reach it is never looked at,
// and in the end those that can are the cut.
#include <tenure/offload/min_cut.h>

#include <algorithm>
#include <limits>

namespace tenure::offload {
namespace {

constexpr uint32_t kNo = std::numeric_limits<uint32_t>::max();
// Of the greatest capacity: less than that is rounding.
constexpr double kNearNothing = 1e-12;

}  // namespace

Network::Network(size_t nodes) : first_(nodes, kNo) {}

void Network::edge(uint32_t from, uint32_t to, double capacity) {
  const auto add = [&](uint32_t at, uint32_t towards, double left) {
    edges_.push_back({.to = towards, .next = first_[at], .left = left});
    first_[at] = static_cast<uint32_t>(edges_.size() - 1);
  };
  add(from, to, capacity);
  add(to, from, 0);
  if (capacity < kEndless) {
    none_ = std::max(none_, capacity * kNearNothing);
  }
}

std::vector<bool> Network::cut(uint32_t source, uint32_t sink) {
  while (measure(source, sink)) {
    saturate(source, sink);
  }
  std::vector<bool> out(first_.size());
  std::transform(distance_.begin(), distance_.end(), out.begin(),
                 [](uint32_t distance) { return distance != kNo; });
  return out;
}

// Whether the source still reaches the sink.
bool Network::measure(uint32_t source, uint32_t sink) {
  distance_.assign(first_.size(), kNo);
  queue_.assign(1, sink);
  distance_[sink] = 0;
  for (size_t i = 0; i < queue_.size(); ++i) {
    const auto node = queue_[i];
    if (distance_[source] != kNo && distance_[node] >= distance_[source]) {
      break;  // none farther is on a shortest path
    }
    for (auto e = first_[node]; e != kNo; e = edges_[e].next) {
      const auto other = edges_[e].to;
      if (distance_[other] == kNo && open(e ^ 1)) {
        distance_[other] = distance_[node] + 1;
        queue_.push_back(other);
      }
    }
  }
  return distance_[source] != kNo;
}

// The next edge of a node that leads towards the sink.
uint32_t Network::advance(uint32_t node) {
  const auto leads = [&](uint32_t e) {
    const auto left = distance_[edges_[e].to];
    return open(e) && left != kNo && left + 1 == distance_[node];
  };
  auto& e = at_[node];
  while (e != kNo && !leads(e)) {
    e = edges_[e].next;
  }
  return e;
}

// Fills shortest paths until there is none.
void Network::saturate(uint32_t source, uint32_t sink) {
  at_ = first_;
  std::vector<uint32_t> path;
  auto node = source;
  while (true) {
    if (node == sink) {
      const auto narrowest =
          std::ranges::min_element(path, {}, [&](uint32_t e) { return edges_[e].left; });
      const auto flow = edges_[*narrowest].left;
      for (const auto e : path) {
        edges_[e].left -= flow;
        edges_[e ^ 1].left += flow;
      }
      node = edges_[*narrowest ^ 1].to;
      path.erase(narrowest, path.end());
    } else if (const auto e = advance(node); e != kNo) {
      path.push_back(e);
      node = edges_[e].to;
    } else if (node == source) {
      return;
    } else {
      distance_[node] = kNo;
      node = edges_[path.back() ^ 1].to;
      path.pop_back();
    }
  }
}

}  // namespace tenure::offload
