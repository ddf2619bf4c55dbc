#include <tenure/store/room.h>

#include "objects_fixture.h"

#include <gtest/gtest.h>

#include <vector>

namespace tenure::store {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

TEST(Room, TheCapIsKeptAndWhatEndsIsGivenBack) {
  const auto room = Room::make(10 * kMiB, [] { return Vacancy(); });
  std::string lack;
  auto first = room->take(8 * kMiB, lack);
  ASSERT_TRUE(first);
  EXPECT_FALSE(room->take(3 * kMiB, lack));
  EXPECT_EQ(lack, "the cap is 10.0 MiB, of which 8.0 MiB are held");
  first.reset();
  EXPECT_TRUE(room->take(10 * kMiB, lack));
}

TEST(Room, TheControlGroupsHeadroomIsKeptWithAReserve) {
  const auto room =
      Room::make(0, [] { return Vacancy{kRoomReserve + 100 * kMiB, kRoomReserve + 1000 * kMiB}; });
  std::string lack;
  EXPECT_FALSE(room->take(101 * kMiB, lack));
  EXPECT_NE(lack.find("100.0 MiB are free under the limit of the memory control group"),
            std::string::npos)
      << lack;
  EXPECT_TRUE(room->take(100 * kMiB, lack));
}

TEST(Room, TheMachinesFreeMemoryIsKept) {
  const auto room = Room::make(0, [] { return Vacancy{std::nullopt, kRoomReserve + 50 * kMiB}; });
  std::string lack;
  EXPECT_FALSE(room->take(51 * kMiB, lack));
  EXPECT_NE(lack.find("50.0 MiB are free on this machine"), std::string::npos) << lack;
}

TEST(Room, WhatIsPromisedButNotYetFilledCounts) {
  const auto room = Room::make(0, [] { return Vacancy{kRoomReserve + 300 * kMiB, std::nullopt}; });
  std::string lack;
  auto first = must(room->take(200 * kMiB, lack));
  EXPECT_FALSE(room->take(200 * kMiB, lack)) << "the kernel does not know of the first one yet";
  first.settle();
  EXPECT_TRUE(room->take(200 * kMiB, lack)) << "from here on it does";
}

TEST(Room, SmallAmountsDoNotAskEachTime) {
  int asked = 0;
  const auto room = Room::make(0, [&asked] {
    ++asked;
    return Vacancy{kRoomReserve + 1000 * kMiB, std::nullopt};
  });
  std::string lack;
  std::vector<std::optional<Charge>> charges;
  for (int i = 0; i < 1000; ++i) {
    charges.push_back(room->take(4096, lack));
    ASSERT_TRUE(charges.back());
  }
  EXPECT_LT(asked, 500);
}

TEST(Room, WhatIsFreeIsNeverOverdrawnByAmountsThatDidNotAsk) {
  const auto room = Room::make(0, [] { return Vacancy{kRoomReserve + 10 * kMiB, std::nullopt}; });
  std::string lack;
  std::vector<std::optional<Charge>> charges;
  while (auto charge = room->take(4096, lack)) {
    charges.push_back(std::move(charge));
    ASSERT_LE(room->held(), 10 * kMiB);
  }
  EXPECT_EQ(room->held(), 10 * kMiB);
}

TEST(Room, ChargesAreJoined) {
  const auto room = Room::make(0, [] { return Vacancy(); });
  std::string lack;
  {
    Charge all;
    all.add(must(room->take(100, lack)));
    all.add(must(room->take(50, lack)));
    EXPECT_EQ(all.bytes(), 150U);
    EXPECT_EQ(room->held(), 150U);
  }
  EXPECT_EQ(room->held(), 0U);
}

TEST(Room, TheKernelSaysWhatTheMachineHas) {
  const auto now = kernel_probe()();
  EXPECT_GT(must(now.machine), kMiB);
}

}  // namespace
}  // namespace tenure::store
