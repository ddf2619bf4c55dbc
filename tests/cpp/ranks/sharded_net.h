// A small model of C++ that can be sharded: sizes are uneven, and the last parameter is so small
// that some ranks have nothing of it.
#pragma once

#include <tenure/shard/model.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

struct Block {
  at::Tensor up, down, bias;
  std::optional<tenure::shard::Unit> unit;

  explicit Block(double seed)
      : up(at::arange(7 * 5, at::kFloat).view({7, 5}).mul(0.01).add(seed).sin().mul(0.3)),
        down(at::arange(5 * 7, at::kFloat).view({5, 7}).mul(0.02).add(seed).cos().mul(0.3)),
        bias(at::full({5}, seed, at::kFloat)) {
    for (auto* leaf : {&up, &down, &bias}) {
      leaf->requires_grad_();
    }
  }

  std::vector<at::Tensor> leaves() const { return {up, down, bias}; }

  at::Tensor forward(const at::Tensor& x) const {
    std::optional<tenure::shard::InUse> use;
    if (unit) {
      use.emplace(unit->use());
    }
    return x + at::linear(at::gelu(at::linear(x, up)), down, bias);
  }
};

struct Net {
  std::vector<Block> blocks{Block(0.1), Block(0.2), Block(0.3)};

  at::Tensor loss(const at::Tensor& x) const {
    auto h = x;
    for (const auto& block : blocks) {
      h = block.forward(h);
    }
    return h.square().mean();
  }
  std::vector<at::Tensor> leaves() const {
    std::vector<at::Tensor> out;
    for (const auto& block : blocks) {
      std::ranges::copy(block.leaves(), std::back_inserter(out));
    }
    return out;
  }
  void shard(tenure::shard::Model& model) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      auto& block = blocks[i];
      block.unit = model.unit("blocks." + std::to_string(i),
                              {{"up", block.up}, {"down", block.down}, {"bias", block.bias}});
    }
  }
};

inline at::Tensor batch(int rank, int step) {
  return at::arange(4 * 5, at::kFloat).view({4, 5}).add(rank * 10 + step).sin();
}

inline bool throws(const std::function<void()>& todo) {
  try {
    todo();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}
