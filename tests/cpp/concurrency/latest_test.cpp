#include <tenure/core/latest.h>

#include <gtest/gtest.h>

#include <thread>

namespace tenure {
namespace {

struct Pair {
  uint64_t number = 0;
  uint64_t twice = 0;
  uint32_t odd_size = 0;
};

TEST(Latest, HasNothingBeforeTheFirstPublication) {
  EXPECT_FALSE(Latest<Pair>().read().has_value());
}

TEST(Latest, GivesTheLastOne) {
  Latest<Pair> latest;
  for (uint64_t i = 1; i <= 5; ++i) {
    latest.publish({i, 2 * i, static_cast<uint32_t>(i)});
    const auto read = latest.read();
    ASSERT_TRUE(read.has_value());
    EXPECT_EQ(read->number, i);
    EXPECT_EQ(read->odd_size, i);
  }
}

TEST(Latest, NeverTearsAndNeverGoesBack) {
  Latest<Pair> latest;
  std::jthread writer([&](const std::stop_token& stop) {
    for (uint64_t i = 1; !stop.stop_requested(); ++i) {
      latest.publish({i, 2 * i, static_cast<uint32_t>(i)});
    }
  });
  uint64_t last = 0;
  for (int reads = 0; reads < 200'000;) {
    const auto pair = latest.read();
    if (!pair) {
      continue;
    }
    ++reads;
    ASSERT_EQ(pair->twice, 2 * pair->number);
    ASSERT_EQ(pair->odd_size, static_cast<uint32_t>(pair->number));
    ASSERT_GE(pair->number, last);
    last = pair->number;
  }
}

}  // namespace
}  // namespace tenure
