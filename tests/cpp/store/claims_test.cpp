#include <tenure/store/claims.h>

#include "objects_fixture.h"
#include <tenure/core/error.h>
#include <tenure/store/errors.h>
#include <tenure/store/objects.h>

#include <gtest/gtest.h>

namespace tenure::store {
namespace {

class Collecting : public testing::Test {
 protected:
  Objects objects{kOwner};

  ConsumerId consumer(const Member& member) { return objects.admit(member); }
  // Fetches as `member` and says that it has it.
  void collect(const Member& member, ObjectId id) {
    const auto who = consumer(member);
    objects.fetch(who, id, {});
    objects.fetched(who, id);
  }
  bool live() { return objects.stats().objects == 1; }
  std::vector<std::string> waiting() { return objects.list(0, 1, nullptr).at(0).waiting; }
};

TEST_F(Collecting, WhatNobodyCollectsIsNotStored) {
  EXPECT_EQ(put(objects, step(1), 1 << 20, listed({})).unstored, "nobody collects it");
  EXPECT_EQ(put(objects, step(1), 1 << 20, counted(0)).unstored, "nobody collects it");
  EXPECT_EQ(objects.stats().objects, 0U);
  EXPECT_EQ(objects.stats().put_bytes, 0U);
  EXPECT_EQ(objects.stats().unstored, 2U);
}

TEST_F(Collecting, TheObjectGoesAfterTheLastOfItsCollectors) {
  const auto id = put(objects, step(1), 100, listed({{"trainer", 0}, {"trainer", 4}})).id;
  collect(trainer(4), id);
  EXPECT_TRUE(live());
  EXPECT_EQ(waiting(), std::vector<std::string>{"trainer 0"});
  collect(trainer(0), id);
  EXPECT_FALSE(live());
  EXPECT_EQ(objects.account(step(1)).total.freed[static_cast<size_t>(Freed::fetched)], 1U);
}

TEST_F(Collecting, AFetchThatIsNotConfirmedFillsNothing) {
  const auto id = put(objects, step(1), 100, counted(1)).id;
  objects.fetch(consumer(trainer(0)), id, {});
  EXPECT_TRUE(live());
}

TEST_F(Collecting, OthersAreRefusedAndToldWhoMay) {
  const auto id = put(objects, step(7), 100, listed({{"trainer", 0}, {"critic", {}}})).id;
  const auto what = what_of<AccessRefused>([&] { objects.fetch(consumer(trainer(5)), id, {}); });
  for (const auto* part : {"trainer 5", "step 7", "trainer 0, any critic"}) {
    EXPECT_NE(what.find(part), std::string::npos) << part << " in: " << what;
  }
}

TEST_F(Collecting, TheSameMemberFillsItsPlaceOnce) {
  const auto id = put(objects, step(1), 100, listed({{"trainer", 0}, {"trainer", {}}})).id;
  collect(trainer(0), id);
  collect(trainer(0), id);
  EXPECT_EQ(waiting(), std::vector<std::string>{"any trainer"});
  collect(trainer(1), id);
  EXPECT_FALSE(live());
}

TEST_F(Collecting, AMemberListedTwiceIsExpectedTwice) {
  const auto id = put(objects, step(1), 100, listed({{"trainer", 0}, {"trainer", 0}})).id;
  collect(trainer(0), id);
  EXPECT_TRUE(live());
  collect(trainer(0), id);
  EXPECT_FALSE(live());
}

TEST_F(Collecting, TheMostSpecificPlaceIsFilledFirst) {
  const auto id = put(objects, step(1), 100, listed({{"", {}}, {"", 3}, {"trainer", {}}})).id;
  collect(trainer(3), id);
  EXPECT_EQ(waiting(), (std::vector<std::string>{collector_text({"", {}}), "rank 3"}));
  collect(trainer(3), id);
  EXPECT_EQ(waiting(), std::vector<std::string>{collector_text({"", {}})});
  collect(trainer(3), id);
  EXPECT_FALSE(live());
}

TEST_F(Collecting, ACountIsOfFetchesByAnyone) {
  const auto id = put(objects, step(1), 100, counted(2)).id;
  collect(trainer(0), id);
  EXPECT_EQ(waiting(), std::vector<std::string>{"1 fetch by anyone"});
  collect({"critic", 9, 5}, id);
  EXPECT_FALSE(live());
}

TEST_F(Collecting, WhatAnyoneMayFetchStaysUntilItsScopeCloses) {
  const auto id = put(objects, step(1), 100, anyone()).id;
  for (int i = 0; i < 100; ++i) {
    collect(trainer(i), id);
  }
  EXPECT_TRUE(live());
  objects.close(step(1), kController);
  EXPECT_FALSE(live());
}

TEST_F(Collecting, MoreThanSixtyFourCollectorsAreEachWaitedFor) {
  for (const int count : {64, 65, 130}) {
    std::vector<Collector> all;
    for (int rank = 0; rank < count; ++rank) {
      all.push_back({"trainer", rank});
    }
    const auto id = put(objects, step(1), 100, listed(all)).id;
    for (int rank = count - 1; rank > 0; --rank) {
      collect(trainer(rank), id);
    }
    EXPECT_EQ(waiting(), std::vector<std::string>{"trainer 0"});
    collect(trainer(0), id);
    EXPECT_FALSE(live()) << count;
  }
}

TEST_F(Collecting, SetsThatCannotBeOnesAreRefused) {
  EXPECT_THROW(put(objects, step(1), 1, listed({{"trainer", -2}})), InputError);
  EXPECT_THROW(put(objects, step(1), 1, listed(std::vector<Collector>(kMostCollectors + 1))),
               InputError);
  EXPECT_THROW(put(objects, step(1), 1, listed({{"a:b", 1}})), InputError);
}

}  // namespace
}  // namespace tenure::store
