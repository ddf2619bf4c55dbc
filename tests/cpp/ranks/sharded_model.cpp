// A sharded model of C++ on several ranks.
#include "sharded_model.h"

#include <tenure/core/error.h>
#include <tenure/shard/model.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace {

using tenure::shard::InUse;
using tenure::shard::Model;
using tenure::shard::Unit;

struct Block {
  at::Tensor up, down, bias;
  std::optional<Unit> unit;

  explicit Block(double seed)
      : up(at::arange(7 * 5, at::kFloat).view({7, 5}).mul(0.01).add(seed).sin().mul(0.3)),
        down(at::arange(5 * 7, at::kFloat).view({5, 7}).mul(0.02).add(seed).cos().mul(0.3)),
        bias(at::full({5}, seed, at::kFloat)) {
    for (auto* leaf : {&up, &down, &bias}) {
      leaf->requires_grad_();
    }
  }

  at::Tensor forward(const at::Tensor& x) const {
    std::optional<InUse> use;
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
  void shard(Model& model) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      auto& block = blocks[i];
      block.unit = model.unit("blocks." + std::to_string(i),
                              {{"up", block.up}, {"down", block.down}, {"bias", block.bias}});
    }
  }
};

at::Tensor batch(int rank, int step) {
  return at::arange(4 * 5, at::kFloat).view({4, 5}).add(rank * 10 + step).sin();
}

double step(const Net& net, const std::vector<at::Tensor>& leaves, int rank, int number) {
  const auto loss = net.loss(batch(rank, number));
  loss.backward();
  const at::NoGradGuard no_grad;
  for (const auto& leaf : leaves) {
    TORCH_CHECK(leaf.grad().defined(), "no gradient came");
    leaf.sub_(leaf.grad() * 0.5);
    leaf.mutable_grad().reset();
  }
  return loss.item<double>();
}

// Data parallel training of all ranks' batches, in one process.
std::vector<double> plain_losses(int rank, int ranks, int steps) {
  const Net net;
  std::vector<double> out;
  for (int number = 0; number < steps; ++number) {
    for (int other = 0; other < ranks; ++other) {
      const auto loss = net.loss(batch(other, number));
      (loss / ranks).backward();
      if (other == rank) {
        out.push_back(loss.item<double>());
      }
    }
    const at::NoGradGuard no_grad;
    for (const auto& block : net.blocks) {
      for (const auto* leaf : {&block.up, &block.down, &block.bias}) {
        leaf->sub_(leaf->grad() * 0.5);
        leaf->mutable_grad().reset();
      }
    }
  }
  return out;
}

bool throws(const std::function<void()>& todo) {
  try {
    todo();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

}  // namespace

Losses train_sharded(const Group& group, const Group& side, const Store& store) {
  constexpr int steps = 4;
  Model model(group, side, store);
  Net net;
  net.shard(model);
  Losses out;
  out.plain = plain_losses(group->getRank(), group->getSize(), steps);
  for (int number = 0; number < steps; ++number) {
    out.sharded.push_back(step(net, model.pieces(), group->getRank(), number));
    TORCH_CHECK(model.stats().gathered_bytes == 0, "gathered after a step");
  }
  for (const auto& unit : model.stats().units) {
    TORCH_CHECK(unit.gathers == uint64_t{2} * steps, unit.name, " was gathered ", unit.gathers,
                " times");
  }
  return out;
}

void release_sharded(const Group& group, const Group& side, const Store& store) {
  Model model(group, side, store);
  Net net;
  net.shard(model);
  const auto& block = net.blocks[0];
  const auto view = block.up.detach().t();
  const auto read = [&] { view.sum(); };
  {
    const auto use = block.unit->use();
    TORCH_CHECK(view.sum().equal(block.up.t().sum()), "a view of another tensor");
  }
  TORCH_CHECK(throws(read), "readable after a use");
  const auto loss = net.loss(batch(group->getRank(), 0));
  TORCH_CHECK(throws(read), "readable after a forward");
  loss.backward();
  TORCH_CHECK(throws(read), "readable after a backward");
}

void misuse_sharded(const Group& group, const Group& side, const Store& store) {
  Model model(group, side, store);
  Net net;
  net.shard(model);
  const auto rank = group->getRank();
  for (int number = 0; number < 6; ++number) {
    const auto loss = net.loss(batch(rank, number));
    if (number % 3 == 0) {
      continue;  // forward only
    }
    const bool again = number % 3 == 1;
    loss.backward({}, again);
    if (again) {
      loss.backward();
    }
    TORCH_CHECK(model.stats().gathered_bytes == 0, "gathered after a step");
  }
  const auto fails = [&] {
    const auto use = net.blocks[0].unit->use();
    throw std::runtime_error("in a forward");
  };
  TORCH_CHECK(throws(fails) && model.stats().gathered_bytes == 0, "gathered after an exception");
  {
    const at::NoGradGuard no_grad;
    net.loss(batch(rank, 0));
    TORCH_CHECK(model.stats().gathered_bytes == 0, "gathered after a forward without gradients");
  }
  const auto leaf = at::randn({3}).requires_grad_();
  TORCH_CHECK(throws([&] { model.unit("unit", {{"made", leaf * 2}}); }), "not a leaf");
  step(net, model.pieces(), rank, 0);
}
