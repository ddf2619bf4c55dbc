// Offloading from C++ alone: no Python in this process.
#include <tenure/offload/active.h>

#include "gradient.h"
#include <tenure/core/error.h>
#include <tenure/core/ledger.h>

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <thread>

namespace tenure::offload {
namespace {

Options copies() {
  Options out;
  out.target = Target::copy;
  out.min_bytes = 1;
  return out;
}

at::Tensor leaf(int64_t rows, int64_t columns) {
  return at::randn({rows, columns}).requires_grad_();
}

// Of the weights, after a chain of three products and their squares.
at::Tensor chain(const at::Tensor& weight) {
  return weight.mm(weight).square().mm(weight).square().sum();
}

TEST(Active, GradientsAreThoseOfPlainSteps) {
  Session session(copies());
  for (int step = 0; step < 5; ++step) {
    const auto weight = leaf(16, 16);
    const auto plain = gradient(weight, chain(weight));
    Active active(session);
    const auto ours = gradient(weight, chain(weight));
    active.end();
    EXPECT_TRUE(at::equal(plain, ours)) << step;
  }
  EXPECT_GT(session.stats().moved_out.count, 0U);
  EXPECT_EQ(session.stats().mode, Mode::planned);
  EXPECT_EQ(session.stats().host_bytes, 0U);
}

TEST(Active, EndsWithItsBlock) {
  Session session(copies());
  const auto weight = leaf(16, 16);
  {
    const Active active(session);
  }
  EXPECT_FALSE(session.active());
  const auto plain = chain(weight);
  EXPECT_EQ(session.stats().saved.count, 0U);
}

TEST(Active, AnExceptionAbandonsTheStep) {
  Session session(copies());
  const auto weight = leaf(16, 16);
  try {
    const Active active(session);
    const auto loss = chain(weight);
    throw std::runtime_error("out of luck");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(session.active());
  EXPECT_EQ(session.stats().host_bytes, 0U);
  const auto plain = gradient(weight, chain(weight));
  const Active active(session);
  EXPECT_TRUE(at::equal(plain, gradient(weight, chain(weight))));
}

TEST(Active, TheSameSessionTwiceIsRefused) {
  Session session(copies());
  const Active active(session);
  EXPECT_THROW(Active{session}, InputError);
}

TEST(Active, TheInnerSessionGetsWhatIsSavedInside) {
  Session outer(copies());
  Session inner(copies());
  const auto weight = leaf(16, 16);
  {
    const Active one(outer);
    const Active two(inner);
    gradient(weight, chain(weight));
  }
  EXPECT_EQ(outer.stats().saved.count, 0U);
  EXPECT_GT(inner.stats().saved.count, 0U);
}

TEST(Active, WritingToASavedTensorRaises) {
  Session session(copies());
  const Active active(session);
  const auto weight = leaf(16, 16);
  auto product = weight.mul(2);
  const auto loss = product.square().sum();
  product.mul_(3);
  try {
    gradient(weight, loss);
    FAIL() << "no error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"), std::string::npos)
        << error.what();
  }
}

TEST(Active, ThreadsHaveTheirOwn) {
  Session session(copies());
  const Active active(session);
  std::thread([] {
    const auto weight = leaf(8, 8);
    EXPECT_TRUE(gradient(weight, chain(weight)).defined());
  }).join();
  EXPECT_EQ(session.stats().tracked, 0U);
}

TEST(Active, BackwardMayComeAfterTheSession) {
  const auto weight = leaf(16, 16);
  const auto plain = gradient(weight, chain(weight));
  at::Tensor loss;
  {
    Session session(copies());
    const Active active(session);
    loss = chain(weight);
  }
  EXPECT_TRUE(at::equal(plain, gradient(weight, loss)));
  loss.reset();
  EXPECT_EQ(ledger().totals().all.bytes, 0U);
}

TEST(Active, DoubleBackward) {
  Session session(copies());
  const auto weight = leaf(8, 8);
  const auto twice = [&] {
    const auto first = torch::autograd::grad({chain(weight)}, {weight}, {}, true, true)[0];
    return torch::autograd::grad({first.square().sum()}, {weight})[0];
  };
  const auto plain = twice();
  const Active active(session);
  EXPECT_TRUE(at::equal(plain, twice()));
}

}  // namespace
}  // namespace tenure::offload
