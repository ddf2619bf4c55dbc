#include <tenure/core/part.h>
#include <tenure/offload/session.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tenure::offload {
namespace {

std::vector<std::pair<std::string, int64_t>> told() { return part_named("offload")->stats(); }

std::vector<std::pair<std::string, int64_t>> bound(int64_t bytes) {
  return {{"bound_bytes", bytes}};
}

std::unique_ptr<Session> session(std::optional<uint64_t> budget) {
  Options options;
  options.target = Target::copy;
  options.budget = budget;
  return std::make_unique<Session>(options);
}

TEST(Promise, TheTightestOfThoseThatAreKeptIsTold) {
  const auto without = session({});
  auto wide = session(4096);
  EXPECT_EQ(told(), bound(4096));
  auto tight = session(1024);
  const auto same = session(1024);
  EXPECT_EQ(told(), bound(1024));
  tight.reset();
  EXPECT_EQ(told(), bound(1024));
  wide.reset();
  EXPECT_EQ(told(), bound(1024));
}

TEST(Promise, WhatWasMovedIsDisplacedUntilItIsLetGo) {
  const auto displaced = [] { return part_named("offload")->displaced(c10::kCPU); };
  const auto one = session({});
  one->begin();
  auto tensor = at::zeros({1024});
  auto saved = one->pack(tensor);
  EXPECT_EQ(displaced(), 0) << "it is still there";
  tensor.reset();
  EXPECT_EQ(displaced(), 4096);
  std::jthread([&] { EXPECT_EQ(displaced(), 0) << "another thread's"; }).join();
  {
    const auto back = Session::unpack(saved);
    EXPECT_EQ(displaced(), 0) << "it is there again";
  }
  EXPECT_EQ(displaced(), 4096);
  saved = {};
  EXPECT_EQ(displaced(), 0);
  one->end();
}

TEST(Promise, NothingIsToldWhenNoneIsLeft) {
  session(4096).reset();
  EXPECT_EQ(told(), bound(0));
}

}  // namespace
}  // namespace tenure::offload
