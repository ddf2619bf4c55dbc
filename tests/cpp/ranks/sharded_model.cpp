// A sharded model of C++ on several ranks.
#include "sharded_model.h"

#include "sharded_net.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <stdexcept>
#include <utility>
#include <vector>

namespace {

using tenure::shard::Model;

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

// A backward that fails in the middle, and another one with no forward between them.
void fail_and_go_on(const Net& net, int number, bool again) {
  auto between = at::Tensor();
  const auto run = [&](const at::Tensor& x) {
    auto h = x;
    for (const auto& block : net.blocks) {
      h = block.forward(h);
      between = &block == &net.blocks[1] ? h : between;
    }
    return h.square().mean();
  };
  const auto other = run(batch(0, number + 1));
  const auto loss = run(batch(0, number));
  const auto hook = between.register_hook(
      [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("in a backward"); });
  TORCH_CHECK(throws([&] { loss.backward({}, /*retain_graph=*/true); }), "the hook was not called");
  between.remove_hook(hook);
  for (const auto& leaf : net.leaves()) {
    leaf.mutable_grad().reset();  // a plain model has what came
  }
  (again ? loss : other).backward();
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
  auto piece = model.pieces().front();
  const auto before = piece.detach();
  piece.set_data(at::zeros_like(before));
  TORCH_CHECK(throws([&] { net.loss(batch(rank, 0)); }), "a piece's other tensor is not read");
  piece.set_data(before);
  step(net, model.pieces(), rank, 0);
}

void failing_sharded(const Group& group, const Group& side, const Store& store) {
  Model model(group, side, store);
  const Net plain;
  Net net;
  net.shard(model);
  for (int number = 0; number < 4; ++number) {
    fail_and_go_on(net, number, number % 2 == 0);
    fail_and_go_on(plain, number, number % 2 == 0);
    TORCH_CHECK(model.stats().gathered_bytes == 0, "gathered after a backward");
    std::vector<at::Tensor> gradients;
    for (auto& piece : model.pieces()) {
      TORCH_CHECK(piece.grad().defined(), "no gradient came");
      gradients.push_back(std::exchange(piece.mutable_grad(), {}));
    }
    const auto leaves = plain.leaves();
    model.join(gradients, [&](size_t i, const at::Tensor& whole) {
      TORCH_CHECK(at::allclose(whole, leaves[i].grad()), model.names()[i], ": ", whole, " is not ",
                  leaves[i].grad());
    });
  }
}

void partly_sharded(const Group& group, const Group& side, const Store& store) {
  Model model(group, side, store);
  Net net;
  net.shard(model);
  const auto& block = net.blocks[1];
  for (int number = 0; number < 2; ++number) {
    const auto before = model.stats().units[1].reduces;
    const auto x = net.blocks[0].forward(batch(group->getRank(), number));
    std::vector<at::Tensor> made;
    {
      const auto use = block.unit->use();
      made = {at::linear(x, block.up), at::linear(x.mm(block.down), block.down)};
    }
    bool looked = false;
    x.register_hook([&](const at::Tensor& gradient) {
      looked = true;
      TORCH_CHECK(throws([&] { block.up.detach().sum(); }), "gathered beyond its last node");
      TORCH_CHECK(model.stats().units[1].reduces == before + 1, "its sum has not begun");
      return gradient;
    });
    made[0].sum().backward();
    TORCH_CHECK(looked && model.stats().gathered_bytes == 0);
    for (const auto& piece : model.pieces()) {
      piece.mutable_grad().reset();
    }
  }
}

void written_in_backward(const Group& group, const Group& side, const Store& store) {
  Model model(group, side, store);
  Net net;
  net.shard(model);
  const auto rank = group->getRank();
  step(net, model.pieces(), rank, 0);
  const auto& block = net.blocks[0];
  const auto x = batch(rank, 0).requires_grad_();
  at::Tensor between;
  at::Tensor loss;
  {
    const auto use = block.unit->use();
    between = at::linear(x, block.up);
    loss = at::linear(at::gelu(between), block.down, block.bias).sum();
  }
  between.register_hook([&](const at::Tensor& gradient) {
    const at::NoGradGuard no_grad;
    block.up.mul_(1);
    return gradient;
  });
  TORCH_CHECK(throws([&] { loss.backward(); }), "the write is not seen");
  step(net, model.pieces(), rank, 1);  // it is told of once
}
