#include <tenure/store/slots.h>

#include <gtest/gtest.h>

#include <limits>
#include <set>

namespace tenure::store {
namespace {

ObjectId take(Slots& slots) {
  const auto index = slots.take();
  slots.at(index).state = Slot::State::live;
  return {index, slots.at(index).generation};
}

TEST(Slots, APairIsNeverGivenOutTwice) {
  Slots slots;
  std::set<std::pair<uint32_t, uint32_t>> seen;
  for (int i = 0; i < 50'000; ++i) {
    const auto id = take(slots);
    ASSERT_TRUE(seen.emplace(id.slot, id.generation).second);
    slots.give_back(id.slot);
  }
  EXPECT_LT(slots.end(), 10'000U) << "places are used again";
}

TEST(Slots, APlaceWhoseGenerationsAreSpentIsRetired) {
  Slots slots(std::numeric_limits<uint32_t>::max());
  for (uint32_t i = 0; i < 10'000; ++i) {
    const auto id = take(slots);
    ASSERT_EQ(id.slot, i);
    slots.give_back(id.slot);
    EXPECT_NE(slots.known(id), nullptr) << "its word stays";
  }
}

TEST(Slots, TheOneThatWasFreedFirstIsUsedFirst) {
  Slots slots;
  for (uint32_t i = 0; i < kWordsKept + 2; ++i) {
    take(slots);
  }
  for (uint32_t i = kWordsKept + 2; i > 0; --i) {
    slots.give_back(i - 1);
  }
  EXPECT_EQ(slots.take(), kWordsKept + 1);
}

TEST(Slots, LiveOnesAreFoundInOrder) {
  Slots slots;
  for (int i = 0; i < 20'000; ++i) {
    take(slots);
  }
  for (uint32_t i = 0; i < 20'000; ++i) {
    if (i != 3 && i != 15'000) {
      slots.give_back(i);
    }
  }
  EXPECT_EQ(slots.next_live(0), 3U);
  EXPECT_EQ(slots.next_live(4), 15'000U);
  EXPECT_EQ(slots.next_live(15'001), slots.end());
}

}  // namespace
}  // namespace tenure::store
