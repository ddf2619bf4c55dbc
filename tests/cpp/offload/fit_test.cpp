// A Fit from C++ alone: no Python in this process.
#include "gradient.h"
#include <tenure/core/error.h>
#include <tenure/core/ledger.h>
#include <tenure/offload/active.h>

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <thread>

namespace tenure::offload {
namespace {

constexpr uint64_t kPlenty = uint64_t{1} << 40;

Options within(uint64_t budget) {
  Options out;
  out.target = Target::copy;
  out.recompute = true;
  out.moves = false;
  out.budget = budget;
  return out;
}

at::Tensor leaf() { return at::randn({128, 128}).div_(8).requires_grad_(); }

// Layers of which much can be made again.
at::Tensor layers(const at::Tensor& weight) {
  auto x = weight;
  for (int i = 0; i < 8; ++i) {
    x = x.mm(weight).sigmoid().exp().sin();
  }
  return x.sum();
}

at::Tensor step(Session& session, const at::Tensor& weight) {
  Active active(session);
  auto out = gradient(weight, layers(weight));
  active.end();
  return out;
}

// With the part that a session leaves free.
uint64_t least_budget(const at::Tensor& weight) {
  Session session(within(kPlenty));
  step(session, weight);
  return static_cast<uint64_t>(static_cast<double>(session.frontier(8).back().peak) / 0.9);
}

TEST(Fit, GradientsAreThoseOfPlainSteps) {
  const auto weight = leaf();
  const auto plain = gradient(weight, layers(weight));
  Session session(within(least_budget(weight)));
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(at::equal(plain, step(session, weight))) << i;
  }
  EXPECT_EQ(session.stats().mode, Mode::planned);
  EXPECT_GT(session.stats().dropped.bytes, 0U);
  EXPECT_GT(session.stats().remade.count, 0U);
  EXPECT_LE(session.stats().peak, session.stats().budget);
}

TEST(Fit, BackwardMayComeAfterTheSession) {
  const auto weight = leaf();
  const auto plain = gradient(weight, layers(weight));
  at::Tensor loss;
  {
    Session session(within(least_budget(weight)));
    for (int i = 0; i < 3; ++i) {
      step(session, weight);
    }
    const Active active(session);
    loss = layers(weight);
  }
  EXPECT_TRUE(at::equal(plain, gradient(weight, loss)));
  loss.reset();
  EXPECT_EQ(ledger().totals().all.bytes, 0U);
}

TEST(Fit, BackwardMayRunOnAnotherThread) {
  const auto weight = leaf();
  const auto plain = gradient(weight, layers(weight));
  Session session(within(least_budget(weight)));
  for (int i = 0; i < 4; ++i) {
    Active active(session);
    const auto loss = layers(weight);
    at::Tensor ours;
    std::thread([&] { ours = gradient(weight, loss); }).join();
    EXPECT_TRUE(at::equal(plain, ours)) << i;
    active.end();
  }
  EXPECT_GT(session.stats().remade.count, 0U);
}

TEST(Fit, AnExceptionAbandonsTheStep) {
  const auto weight = leaf();
  const auto plain = gradient(weight, layers(weight));
  Session session(within(least_budget(weight)));
  for (int i = 0; i < 6; ++i) {
    if (i % 2 == 1) {
      EXPECT_TRUE(at::equal(plain, step(session, weight))) << i;
      continue;
    }
    try {
      const Active active(session);
      const auto loss = layers(weight);
      throw std::runtime_error("out of luck");
    } catch (const std::runtime_error&) {
      EXPECT_FALSE(session.active());
    }
  }
}

TEST(Fit, ABudgetThatCannotBeMetNamesTheLeast) {
  const auto weight = leaf();
  Session session(within(1024));
  Active active(session);
  gradient(weight, layers(weight));
  try {
    active.end();
    FAIL() << "no error";
  } catch (const BudgetError& error) {
    EXPECT_NE(std::string(error.what()).find("Give at least"), std::string::npos) << error.what();
  }
}

TEST(Fit, NeedsABudget) {
  Options options;
  options.recompute = true;
  EXPECT_THROW(Session{options}, InputError);
}

TEST(Fit, OneInsideAnotherIsRefused) {
  Session outer(within(kPlenty));
  Session inner(within(kPlenty));
  const Active active(outer);
  EXPECT_THROW(Active{inner}, InputError);
  EXPECT_FALSE(inner.active());
}

}  // namespace
}  // namespace tenure::offload
