#include <tenure/inspect/dominators.h>

#include <algorithm>
#include <utility>

namespace tenure::inspect {
namespace {

// Semi-NCA (Georgiadis and Tarjan): as Lengauer and Tarjan's, but the second half climbs the tree
// that is being made instead of keeping buckets. Nodes are numbered as a depth-first walk meets
// them, from 1; 0 is the one that refers to all roots.
class Walk {
 public:
  Walk(Edges graph, std::span<const uint32_t> roots) : graph_(graph), number_(graph.nodes(), 0) {
    for (const auto root : roots) {
      visit(root);
    }
    find_referrers(roots);
    find_semidominators();
  }

  std::vector<uint32_t> take() const {
    std::vector<uint32_t> nearest(parent_.size(), 0);
    std::vector<uint32_t> out(graph_.nodes(), kNoDominator);
    for (uint32_t i = 1; i < parent_.size(); ++i) {
      auto at = parent_[i];
      while (at > semi_[i]) {
        at = nearest[at];
      }
      nearest[i] = at;
      out[node_[i]] = at == 0 ? kNoDominator : node_[at];
    }
    return out;
  }

 private:
  void visit(uint32_t root) {
    if (number_[root] != 0) {
      return;
    }
    enter(root, 0);
    std::vector<std::pair<uint32_t, uint32_t>> open{{root, 0}};  // node, how many edges are done
    while (!open.empty()) {
      auto& [node, done] = open.back();
      const auto targets = graph_.of(node);
      if (done == targets.size()) {
        open.pop_back();
        continue;
      }
      const auto target = targets[done++];
      if (number_[target] == 0) {
        enter(target, number_[node]);
        open.emplace_back(target, 0);
      }
    }
  }

  void enter(uint32_t node, uint32_t parent) {
    number_[node] = static_cast<uint32_t>(parent_.size());
    node_.push_back(node);
    parent_.push_back(parent);
  }

  // By number: those of i are referrers_[first_referrer_[i]] to referrers_[first_referrer_[i + 1]].
  void find_referrers(std::span<const uint32_t> roots) {
    first_referrer_.assign(parent_.size() + 1, 0);
    const auto each = [&](const auto& found) {
      for (const auto root : roots) {
        found(0, number_[root]);
      }
      for (uint32_t i = 1; i < parent_.size(); ++i) {
        for (const auto target : graph_.of(node_[i])) {
          found(i, number_[target]);
        }
      }
    };
    each([&](uint32_t, uint32_t to) { ++first_referrer_[to + 1]; });
    for (size_t i = 1; i < first_referrer_.size(); ++i) {
      first_referrer_[i] += first_referrer_[i - 1];
    }
    referrers_.resize(first_referrer_.back());
    auto next = first_referrer_;
    each([&](uint32_t from, uint32_t to) { referrers_[next[to]++] = from; });
  }

  void find_semidominators() {
    const auto count = static_cast<uint32_t>(parent_.size());
    semi_.resize(count);
    best_.resize(count);
    above_ = parent_;
    for (uint32_t i = 0; i < count; ++i) {
      semi_[i] = best_[i] = i;
    }
    for (uint32_t i = count; i-- > 1;) {
      auto least = parent_[i];
      for (auto r = first_referrer_[i]; r < first_referrer_[i + 1]; ++r) {
        const auto from = referrers_[r];
        least = std::min(least, from <= i ? from : semi_[best_above(from, i)]);
      }
      semi_[i] = least;
    }
  }

  // The node with the least semidominator on the way from `node` up to those above `last`, which
  // are not decided yet. Shortens the way for the next time.
  uint32_t best_above(uint32_t node, uint32_t last) {
    trail_.clear();
    for (auto at = node; above_[at] > last; at = above_[at]) {
      trail_.push_back(at);
    }
    while (!trail_.empty()) {
      const auto at = trail_.back();
      trail_.pop_back();
      const auto over = above_[at];
      if (semi_[best_[over]] < semi_[best_[at]]) {
        best_[at] = best_[over];
      }
      above_[at] = above_[over];
    }
    return best_[node];
  }

  Edges graph_;
  std::vector<uint32_t> number_;              // by node; 0: not met
  std::vector<uint32_t> node_{kNoDominator};  // and all that follows by number
  std::vector<uint32_t> parent_{0};
  std::vector<uint32_t> first_referrer_, referrers_;
  std::vector<uint32_t> semi_, best_, above_, trail_;
};

}  // namespace

std::vector<uint32_t> dominators(Edges graph, std::span<const uint32_t> roots) {
  return Walk(graph, roots).take();
}

std::vector<uint64_t> gone_with(std::span<const uint32_t> dominators,
                                std::span<const uint64_t> weights) {
  // Leaves first: a node is added to the one above it once nothing is left below it.
  std::vector<uint64_t> out(weights.begin(), weights.end());
  std::vector<uint32_t> below(dominators.size(), 0);
  for (const auto above : dominators) {
    if (above != kNoDominator) {
      ++below[above];
    }
  }
  std::vector<uint32_t> ready;
  for (uint32_t node = 0; node < dominators.size(); ++node) {
    if (below[node] == 0) {
      ready.push_back(node);
    }
  }
  while (!ready.empty()) {
    const auto node = ready.back();
    ready.pop_back();
    const auto above = dominators[node];
    if (above != kNoDominator) {
      out[above] += out[node];
      if (--below[above] == 0) {
        ready.push_back(above);
      }
    }
  }
  return out;
}

}  // namespace tenure::inspect
