#include "held_model.h"

#include "sharded_net.h"
#include <tenure/core/error.h>
#include <tenure/core/meter.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>

namespace {

using tenure::shard::Model;

constexpr int kMicrobatches = 4;

void microbatches(const Net& net, int rank, int step) {
  for (int i = 0; i < kMicrobatches; ++i) {
    net.loss(batch(rank, step * kMicrobatches + i)).backward();
  }
}

uint64_t bytes_of_all(const Model& model) {
  uint64_t out = 0;
  for (const auto& unit : model.stats().units) {
    out += unit.bytes;
  }
  return out;
}

std::vector<at::Tensor> taken_gradients(const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> out;
  for (const auto& leaf : leaves) {
    out.push_back(std::exchange(leaf.mutable_grad(), {}));
  }
  return out;
}

// Of this rank's piece, added up in the order in which shard does.
at::Tensor mean_of_piece(const Model& model, size_t index, const std::vector<at::Tensor>& by_rank,
                         int rank) {
  at::Tensor sum;
  const auto add = [&](const at::Tensor& one) {
    const auto piece = model.piece_of(index, one);
    sum = sum.defined() ? sum + piece : piece;
  };
  for (size_t other = 0; other < by_rank.size(); ++other) {
    if (static_cast<int>(other) != rank) {
      add(by_rank[other]);
    }
  }
  add(by_rank.at(static_cast<size_t>(rank)));
  return by_rank.size() == 1 ? sum : sum / static_cast<double>(by_rank.size());
}

void update(const std::vector<at::Tensor>& leaves, const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < leaves.size(); ++i) {
    leaves[i].sub_(gradients[i] * 0.05);
  }
}

// One step of `net`, held, and whether its gradients are those of `plain`, which has its values.
// Both are trained.
void check_step(const Group& group, Model& model, const Net& net, const Net& plain, int step) {
  const auto rank = group->getRank();
  auto held = model.hold();
  TORCH_CHECK(model.stats().gathered_bytes == bytes_of_all(model), "not all is gathered");
  {
    const auto use = net.blocks[0].unit->use();
    const auto made = at::linear(batch(rank, 0), net.blocks[0].up);
    TORCH_CHECK(made.grad_fn()->pre_hooks().empty(), "its backward is watched");
  }
  microbatches(net, rank, step);
  held.end();

  std::vector<std::vector<at::Tensor>> wanted(plain.leaves().size());  // by leaf and rank
  for (int other = 0; other < group->getSize(); ++other) {
    microbatches(plain, other, step);
    const auto gradients = taken_gradients(plain.leaves());
    for (size_t i = 0; i < wanted.size(); ++i) {
      wanted[i].push_back(gradients[i]);
    }
  }
  const auto pieces = model.pieces();
  const auto gradients = taken_gradients(pieces);
  for (size_t i = 0; i < pieces.size(); ++i) {
    TORCH_CHECK(gradients[i].equal(mean_of_piece(model, i, wanted[i], rank)), "step ", step,
                ": another gradient of ", model.names()[i]);
  }
  update(pieces, gradients);
  std::vector<at::Tensor> whole(pieces.size());
  model.join(pieces, [&](size_t index, const at::Tensor& value) { whole[index] = value; });
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < whole.size(); ++i) {
    plain.leaves()[i].copy_(whole[i]);
  }
}

void check_nothing_is_left(const Model& model, const Net& net) {
  TORCH_CHECK(model.stats().gathered_bytes == 0, "still gathered");
  for (const auto& leaf : net.leaves()) {
    TORCH_CHECK(!leaf.grad().defined(), "a gradient is left");
    TORCH_CHECK(throws([&] { leaf.sum(); }), "still readable");
  }
}

// The least that is counted until it is `enough` or the time is up: a thread of the backend lets go
// of what it has moved a moment after that has come.
int64_t least_counted(std::chrono::milliseconds time, int64_t enough = 0) {
  const auto deadline = std::chrono::steady_clock::now() + time;
  auto least = tenure::host_counted();
  while (least > enough && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
    least = std::min(least, tenure::host_counted());
  }
  return least;
}

constexpr std::chrono::milliseconds kMoment{50};
constexpr std::chrono::milliseconds kLong{5000};

template <class Wanted>
std::string thrown(const std::function<void()>& todo) {
  try {
    todo();
  } catch (const Wanted& error) {
    return error.what();
  }
  TORCH_CHECK(false, "nothing was thrown");
}

bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

void held_gradients(const Group& group, const Group& side, const Store& store) {
  constexpr int steps = 3;
  const tenure::HostCount counting;
  Model model(group, side, store);
  Net net;
  const Net plain;
  net.shard(model);
  int64_t level = 0;
  for (int step = 0; step < steps; ++step) {
    check_step(group, model, net, plain, step);
    check_nothing_is_left(model, net);
    const auto grown = step < 2 ? 0 : least_counted(kLong, level) - level;
    TORCH_CHECK(grown <= 0, "memory grew by ", grown, " bytes");
    level = least_counted(kMoment);
  }
  for (const auto& unit : model.stats().units) {
    TORCH_CHECK(unit.gathers == steps && unit.reduces == steps, unit.name, " was gathered ",
                unit.gathers, " times and added up ", unit.reduces, " times");
  }
  // And without a hold, as before.
  net.loss(batch(group->getRank(), 0)).backward();
  check_nothing_is_left(model, net);
  TORCH_CHECK(model.stats().units[1].gathers == steps + 2 &&
              model.stats().units[1].reduces == steps + 1);
}

void held_kinds(const Group& group, const Group& side, const Store& store) {
  tenure::shard::Options options;
  options.gathered = at::kBFloat16;
  options.reduced = at::kFloat;
  Model model(group, side, store, options);
  const auto all = at::ones({3, 7}).requires_grad_();
  const auto expert = at::ones({5}).requires_grad_();
  const auto idle = at::ones({2}).requires_grad_();
  const auto frozen = at::full({2}, 3.0);
  const auto unit =
      model.unit("mixture", {{"all", all}, {"expert", expert}, {"idle", idle}, {"frozen", frozen}});
  auto held = model.hold();
  for (int i = 0; i < 2; ++i) {
    const auto use = unit.use();
    auto loss = all.sum() * frozen.sum();
    if (group->getRank() == 0) {
      loss = loss + expert.sum();
    }
    loss.backward();
  }
  TORCH_CHECK(all.grad().scalar_type() == at::kBFloat16);
  held.end();
  const auto names = model.names();
  const auto pieces = model.pieces();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto& gradient = pieces[i].grad();
    if (names[i] == "idle" || names[i] == "frozen") {
      TORCH_CHECK(!gradient.defined(), names[i], " has a gradient");
      continue;
    }
    const auto wanted = names[i] == "all" ? 12.0 : 2.0 / group->getSize();
    TORCH_CHECK(gradient.scalar_type() == at::kFloat);
    TORCH_CHECK(gradient.allclose(at::full_like(gradient, wanted)), names[i], ": ", gradient);
  }
}

void held_evaluation(const Group& group, const Group& side, const Store& store) {
  Model model(group, side, store);
  Net net;
  const Net plain;
  net.shard(model);
  const auto rank = group->getRank();
  for (int step = 0; step < 2; ++step) {
    const at::NoGradGuard no_grad;
    auto held = model.hold();
    for (int i = 0; i < kMicrobatches; ++i) {
      TORCH_CHECK(net.loss(batch(rank, i)).equal(plain.loss(batch(rank, i))), "another loss");
    }
    held.end();
    check_nothing_is_left(model, net);
  }
  for (const auto& unit : model.stats().units) {
    TORCH_CHECK(unit.gathers == 2 && unit.reduces == 0, unit.name);
  }
  check_step(group, model, net, plain, 0);
}

void held_misuse(const Group& group, const Group& side, const Store& store) {
  const tenure::HostCount counting;
  Model model(group, side, store);
  Net net;
  const Net plain;
  net.shard(model);
  const auto rank = group->getRank();
  check_step(group, model, net, plain, 0);

  const auto level = least_counted(kMoment);
  const auto fails = [&] {
    const auto held = model.hold();
    microbatches(net, rank, 0);
    throw std::runtime_error("in a step");
  };
  thrown<std::runtime_error>(fails);
  check_nothing_is_left(model, net);
  const auto left = least_counted(kLong, level) - level;
  TORCH_CHECK(left <= 0, "an exception leaves ", left, " bytes");
  check_step(group, model, net, plain, 1);

  {
    auto held = model.hold();
    thrown<tenure::InputError>([&] { std::ignore = model.hold(); });
    thrown<tenure::InputError>([&] { model.unit("late", {{"one", at::ones({1})}}); });
    held.end();
    held.end();  // a second time is nothing
  }
  {
    const auto use = net.blocks[0].unit->use();
    thrown<tenure::InputError>([&] { std::ignore = model.hold(); });
  }
  check_step(group, model, net, plain, 2);

  const at::NoGradGuard no_grad;
  const auto written = [&](const std::function<void()>& write) {
    auto held = model.hold();
    {
      const at::AutoGradMode grad(true);
      microbatches(net, rank, 0);
    }
    write();
    const auto said = thrown<tenure::MutationError>([&] { held.end(); });
    check_nothing_is_left(model, net);
    return said;
  };
  TORCH_CHECK(says(written([&] { model.pieces()[0].add_(0); }), "blocks.0"));
  TORCH_CHECK(says(written([&] { net.blocks[1].down.add_(0); }), "'down'"));
  const at::AutoGradMode grad(true);
  check_step(group, model, net, plain, 3);
}

void held_alone(const Group& group, const Group& side, const Store& store) {
  if (group->getSize() == 1) {
    return;
  }
  Model model(group, side, store);
  Net net;
  net.shard(model);
  const auto said = thrown<tenure::CollectiveError>([&] {
    if (group->getRank() == 0) {
      std::ignore = model.hold();
    } else {
      std::ignore = net.blocks[0].unit->use();
    }
  });
  TORCH_CHECK(says(said, "gathering all units to hold them") &&
                  says(said, "gathering unit 'blocks.0' for forward"),
              said);
  TORCH_CHECK(model.stats().gathered_bytes == 0, "still gathered");
}

void joined_pieces(const Group& group, const Group& side, const Store& store) {
  Model model(group, side, store);
  const tenure::shard::Model::Parameters parameters{
      {"odd", at::arange(21, at::kFloat).view({3, 7})},
      {"double", at::arange(4, at::kDouble).view({2, 2})},
      {"one", at::full({1}, 5.0)},
      {"scalar", at::full({}, 6.0)},
      {"none", at::empty({0, 3})},
      {"counts", at::arange(50, at::kLong)},
      {"long", at::arange(101, at::kFloat)},
  };
  std::vector<std::pair<std::string, at::Tensor>> values;
  for (const auto& [name, value] : parameters) {
    values.emplace_back(name, value.clone());
  }
  const auto unit = model.unit("first", parameters);
  const auto other = model.unit("second", {{"more", at::arange(9, at::kFloat)}});
  values.emplace_back("more", at::arange(9, at::kFloat));

  const auto names = model.names();
  const auto pieces = model.pieces();
  TORCH_CHECK(names.size() == values.size() && pieces.size() == values.size());
  const auto value_named = [&](const std::string& name) {
    return std::ranges::find(values, name, &std::pair<std::string, at::Tensor>::first)->second;
  };
  std::vector<size_t> visited;
  std::vector<at::Tensor> again;
  model.join(pieces, [&](size_t index, const at::Tensor& whole) {
    const auto wanted = value_named(names[index]);
    TORCH_CHECK(whole.equal(wanted) && whole.sizes() == wanted.sizes() &&
                    whole.scalar_type() == wanted.scalar_type(),
                names[index], ": ", whole);
    visited.push_back(index);
    again.push_back(model.piece_of(index, whole));
  });
  for (size_t i = 0; i < pieces.size(); ++i) {
    TORCH_CHECK(visited.at(i) == i && again[i].equal(pieces[i]), names[i]);
    TORCH_CHECK(again[i].nbytes() == again[i].storage().nbytes(), "more memory than it needs");
    TORCH_CHECK(again[i].numel() == 0 || !again[i].is_alias_of(pieces[i]));
  }
  // Of another dtype than the parameters, as an optimizer's states may be.
  std::vector<at::Tensor> states;
  for (const auto& piece : pieces) {
    states.push_back(piece.to(at::kDouble) + 1);
  }
  model.join(states, [&](size_t index, const at::Tensor& whole) {
    TORCH_CHECK(whole.equal(value_named(names[index]).to(at::kDouble) + 1), names[index]);
  });

  states.pop_back();
  const auto nothing = [](size_t, const at::Tensor&) {};
  thrown<tenure::InputError>([&] { model.join(states, nothing); });
  states.push_back(at::ones({1000}));
  thrown<tenure::InputError>([&] { model.join(states, nothing); });
  thrown<tenure::InputError>([&] { model.piece_of(0, at::ones({1000})); });
}
