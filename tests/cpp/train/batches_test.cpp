#include <tenure/train/batches.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <set>

namespace tenure::train {
namespace {

class Shuffled : public testing::TestWithParam<uint64_t> {};

TEST_P(Shuffled, TakesEveryPlaceOnce) {
  const auto size = GetParam();
  std::set<uint64_t> places;
  for (uint64_t index = 0; index < size; ++index) {
    places.insert(shuffled(index, size, 7));
  }
  EXPECT_EQ(places.size(), size);
  EXPECT_EQ(*places.rbegin(), size - 1);
}

INSTANTIATE_TEST_SUITE_P(Sizes, Shuffled, testing::Values(1, 2, 3, 4, 5, 16, 17, 1000, 4097));

TEST(Shuffled, AnotherKeyGivesAnotherOrder) {
  int same = 0;
  for (uint64_t index = 0; index < 1000; ++index) {
    same += shuffled(index, 1000, 1) == shuffled(index, 1000, 2) ? 1 : 0;
  }
  EXPECT_LT(same, 20);
}

}  // namespace
}  // namespace tenure::train
