#include <tenure/store/slab.h>

#include "objects_fixture.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace tenure::store {
namespace {

class SmallContents : public testing::Test {
 protected:
  std::shared_ptr<Room> room = Room::make(0, [] { return Vacancy(); });
  std::shared_ptr<Slabs> slabs = Slabs::make(room);
  std::string lack;

  std::shared_ptr<const Content> content(uint64_t bytes, uint64_t seed = 1) {
    const auto whole = pattern(bytes, seed);
    return make_slab_content(Source(whole), must(slabs->take(bytes, lack)));
  }
};

TEST_F(SmallContents, PiecesAreAtMostASixteenthOrSixtyThreeBytesLarger) {
  for (uint64_t bytes = 1; bytes <= 70'000; ++bytes) {
    ASSERT_GE(piece_bytes(bytes), bytes);
    ASSERT_LE(piece_bytes(bytes) - bytes, std::max<uint64_t>(63, bytes / 16)) << bytes;
  }
  EXPECT_EQ(piece_bytes(4096), 4096U);
}

TEST_F(SmallContents, NeighboursDoNotTouchEachOther) {
  std::vector<std::shared_ptr<const Content>> all;
  for (uint64_t i = 0; i < 3000; ++i) {
    all.push_back(content(1 + i * 7 % 5000, i));
  }
  for (uint64_t i = 0; i < 3000; i += 2) {
    all[i] = content(1 + i * 11 % 5000, i + 10'000);
  }
  for (uint64_t i = 0; i < 3000; ++i) {
    const auto want =
        i % 2 == 0 ? pattern(1 + i * 11 % 5000, i + 10'000) : pattern(1 + i * 7 % 5000, i);
    ASSERT_EQ(read_whole(*all[i]), want) << i;
  }
}

TEST_F(SmallContents, WhatIsChargedIsThePagesInUse) {
  auto first = content(100);
  EXPECT_EQ(room->held(), 4096U);
  auto second = content(100);
  EXPECT_EQ(room->held(), 4096U) << "it lies in the same page";
  first = nullptr;
  EXPECT_EQ(room->held(), 4096U) << "the page is still in use";
  second = nullptr;
  EXPECT_EQ(room->held(), 0U);
}

TEST_F(SmallContents, APlaceThatWasFreedIsUsedBeforeAFreshOne) {
  std::vector<std::shared_ptr<const Content>> all;
  for (int i = 0; i < 100; ++i) {
    all.push_back(content(4096));
  }
  const auto held = room->held();
  for (int i = 10; i < 60; ++i) {
    all[i] = nullptr;
  }
  for (int i = 10; i < 60; ++i) {
    all[i] = content(4096);
  }
  EXPECT_EQ(room->held(), held);
}

TEST_F(SmallContents, AnEmptySlabGoesBackToTheSystem) {
  if (kSanitized) {
    GTEST_SKIP() << "a sanitizer's memory is among ours";
  }
  std::vector<std::shared_ptr<const Content>> all;
  for (int i = 0; i < 5000; ++i) {
    all.push_back(content(4096));
  }
  const auto full = resident("RssAnon:");
  all.clear();
  EXPECT_GE(full - resident("RssAnon:"), 19 << 20);
}

TEST_F(SmallContents, AContentOutlivesTheSlabs) {
  const auto kept = content(100);
  slabs = nullptr;
  EXPECT_EQ(read_whole(*kept), pattern(100));
}

TEST_F(SmallContents, NoRoomIsSaid) {
  room = Room::make(8192, [] { return Vacancy(); });
  slabs = Slabs::make(room);
  const auto first = content(8192);
  EXPECT_FALSE(slabs->take(4096, lack));
  EXPECT_NE(lack.find("8.0 KiB"), std::string::npos) << lack;
}

TEST_F(SmallContents, ASourceThatThrowsGivesThePieceBack) {
  const Fill fill = [](uint64_t, std::span<std::byte>) { throw std::domain_error("no"); };
  EXPECT_THROW(make_slab_content(Source(100, 100, fill), must(slabs->take(100, lack))),
               std::domain_error);
  EXPECT_EQ(room->held(), 0U);
}

TEST_F(SmallContents, ALargeOneHasASlabOfItsOwn) {
  const auto bytes = pattern(5'000'000);
  auto alone = make_lone_slab(Source(bytes), must(room->take(5'001'216, lack)));
  EXPECT_EQ(read_whole(*alone), bytes);
  EXPECT_EQ(alone->memory().size(), bytes.size());
  alone = nullptr;
  EXPECT_EQ(room->held(), 0U);
}

}  // namespace
}  // namespace tenure::store
