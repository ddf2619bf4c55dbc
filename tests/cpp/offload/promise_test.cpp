#include <tenure/core/part.h>
#include <tenure/offload/session.h>

#include <gtest/gtest.h>

#include <memory>
#include <string>
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

TEST(Promise, NothingIsToldWhenNoneIsLeft) {
  session(4096).reset();
  EXPECT_EQ(told(), bound(0));
}

}  // namespace
}  // namespace tenure::offload
