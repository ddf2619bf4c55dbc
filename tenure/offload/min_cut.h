// A minimum cut of a network with capacities. Plain data in, plain data out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tenure::offload {

class Network {
 public:
  static constexpr double kEndless = 1e300;

  explicit Network(size_t nodes);
  void edge(uint32_t from, uint32_t to, double capacity);
  // By node: whether it is on the sink's side of the minimum cut that is nearest to the sink.
  // Capacities are used up: it can be asked for once.
  std::vector<bool> cut(uint32_t source, uint32_t sink);

 private:
  // Each has its reverse beside it: edge e and edge e ^ 1.
  struct Edge {
    uint32_t to = 0;
    uint32_t next = 0;  // of the same node
    double left = 0;    // capacity
  };

  bool open(uint32_t edge) const { return edges_[edge].left > none_; }
  bool measure(uint32_t source, uint32_t sink);
  void saturate(uint32_t source, uint32_t sink);
  uint32_t advance(uint32_t node);

  std::vector<Edge> edges_;
  std::vector<uint32_t> first_;  // edge of a node
  double none_ = 0;              // what is left is rounding
  // Of one phase.
  std::vector<uint32_t> distance_;  // to the sink
  std::vector<uint32_t> at_;        // the edge that a node has come to
  std::vector<uint32_t> queue_;
};

}  // namespace tenure::offload
