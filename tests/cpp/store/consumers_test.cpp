#include <tenure/store/consumers.h>

#include "objects_fixture.h"
#include <tenure/store/errors.h>
#include <tenure/store/objects.h>

#include <gtest/gtest.h>

namespace tenure::store {
namespace {

// A store whose leases run on a clock that the test turns.
class Leases : public testing::Test {
 protected:
  int64_t now = 1000;
  Objects objects{kOwner, limits()};

  Limits limits() {
    Limits out;
    out.lease_ms = 100;
    out.clock = [this] { return now; };
    return out;
  }
  uint64_t freed(Freed reason) {
    return objects.account(step(1)).total.freed[static_cast<size_t>(reason)];
  }
};

TEST_F(Leases, AMemberIsOneConsumerWhateverItsConnections) {
  const auto first = objects.admit(trainer(0));
  EXPECT_EQ(objects.admit(trainer(0)), first);
  EXPECT_NE(objects.admit(trainer(0, 101)), first);
  EXPECT_EQ(objects.stats().consumers, 2U);
}

TEST_F(Leases, OneThatPartedLosesItsClaimsAfterTheLease) {
  const auto id = put(objects, step(1), 100, listed({{"trainer", 0}})).id;
  objects.parted(objects.admit(trainer(0)));
  now += 100;
  EXPECT_EQ(objects.expire(), 0U);
  EXPECT_EQ(objects.stats().objects, 1U);
  now += 1;
  EXPECT_EQ(objects.expire(), 1U);
  EXPECT_EQ(objects.stats().objects, 0U);
  EXPECT_EQ(objects.stats().expired, 1U);
  EXPECT_EQ(freed(Freed::expired), 1U);
  const auto what =
      what_of<StaleHandle>([&] { objects.fetch(objects.admit(trainer(0, 7)), id, {}); });
  EXPECT_NE(what.find("trainer 0, the last that was waited for, did not come back"),
            std::string::npos)
      << what;
}

TEST_F(Leases, OneThatComesBackInTimeKeepsThem) {
  put(objects, step(1), 100, listed({{"trainer", 0}}));
  const auto consumer = objects.admit(trainer(0));
  objects.parted(consumer);
  now += 99;
  EXPECT_EQ(objects.admit(trainer(0)), consumer);
  now += 99;
  EXPECT_EQ(objects.expire(), 0U);
  EXPECT_EQ(objects.stats().objects, 1U);
}

TEST_F(Leases, OneThatDoesNotRenewLosesThemThoughItIsConnected) {
  put(objects, step(1), 100, listed({{"trainer", 0}}));
  const auto consumer = objects.admit(trainer(0));
  now += 60;
  objects.renew(consumer);
  now += 60;
  EXPECT_EQ(objects.expire(), 0U);
  now += 60;
  EXPECT_EQ(objects.expire(), 1U);
  EXPECT_EQ(objects.stats().objects, 0U);
  EXPECT_EQ(objects.expire(), 0U) << "a lapse counts once";
}

TEST_F(Leases, AFetchRenews) {
  const auto id = put(objects, step(1), 100).id;
  const auto consumer = objects.admit(trainer(0));
  now += 60;
  objects.fetch(consumer, id, {});
  now += 60;
  EXPECT_EQ(objects.expire(), 0U);
}

TEST_F(Leases, OnlyThePlacesThatNobodyElseCanFillLapse) {
  put(objects, step(1), 100, listed({{"trainer", 0}, {"trainer", {}}}));
  put(objects, step(1), 100, counted(1));
  put(objects, step(1), 100, anyone());
  objects.parted(objects.admit(trainer(0)));
  now += 101;
  objects.expire();
  EXPECT_EQ(objects.stats().objects, 3U);
  EXPECT_TRUE(objects.list(0, 1, nullptr).at(0).waiting.at(0).starts_with("any trainer"));
}

// A role and a number have no claim of anybody's in them, until somebody begins to fetch.
TEST_F(Leases, AFetchThatWasBegunIsAClaimThatLapses) {
  const auto any = put(objects, step(1), 100, listed({{"trainer", {}}})).id;
  const auto two = put(objects, step(1), 100, counted(2)).id;
  const auto other = objects.admit(trainer(1));
  objects.fetch(other, two, {});
  objects.fetched(other, two);
  const auto killed = objects.admit(trainer(0));
  objects.fetch(killed, any, {});
  objects.fetch(killed, two, {});
  objects.parted(killed);
  now += 101;
  objects.renew(other);
  objects.expire();
  EXPECT_EQ(objects.stats().objects, 0U);
  EXPECT_EQ(objects.stats().expired, 2U);
  EXPECT_EQ(freed(Freed::expired), 2U);
}

TEST_F(Leases, OneThatWasSlowIsNotCountedTwice) {
  const auto two = put(objects, step(1), 100, counted(2)).id;
  const auto slow = objects.admit(trainer(0));
  objects.fetch(slow, two, {});
  now += 101;
  EXPECT_EQ(objects.expire(), 1U);
  objects.renew(slow);
  objects.fetch(slow, two, {});
  objects.fetched(slow, two);
  EXPECT_EQ(objects.stats().objects, 1U) << "the other one's fetch is waited for";
  const auto other = objects.admit(trainer(1));
  objects.fetch(other, two, {});
  objects.fetched(other, two);
  EXPECT_EQ(objects.stats().objects, 0U);
}

TEST_F(Leases, AFetchThatWasBegunPassesToTheNextIncarnation) {
  const auto two = put(objects, step(1), 100, counted(2)).id;
  const auto killed = objects.admit(trainer(0, 1));
  objects.fetch(killed, two, {});
  objects.parted(killed);
  now += 60;
  const auto again = objects.admit(trainer(0, 2));
  objects.fetch(again, two, {});
  objects.fetched(again, two);
  now += 60;
  EXPECT_EQ(objects.expire(), 1U);
  EXPECT_EQ(objects.list(0, 1, nullptr).at(0).waiting,
            std::vector<std::string>{"1 fetch by anyone"});
}

TEST_F(Leases, AFetchThatWasBegunLapsesWithTheLastOfItsRank) {
  const auto one = put(objects, step(1), 100, counted(1)).id;
  const auto killed = objects.admit(trainer(0, 1));
  const auto last = objects.admit(trainer(0, 2));
  objects.fetch(killed, one, {});
  objects.parted(killed);
  now += 60;
  objects.renew(last);
  now += 60;
  EXPECT_EQ(objects.expire(), 1U);
  EXPECT_EQ(objects.stats().objects, 1U) << "the last one may fetch it";
  objects.parted(last);
  now += 101;
  EXPECT_EQ(objects.expire(), 1U);
  EXPECT_EQ(freed(Freed::expired), 1U);
}

TEST_F(Leases, OneThatWasSlowLeavesNoPlaceToOthersOfItsRankWhileItIsThere) {
  const auto two = put(objects, step(1), 100, counted(2)).id;
  const auto slow = objects.admit(trainer(0, 1));
  const auto last = objects.admit(trainer(0, 2));
  objects.fetch(slow, two, {});
  now += 60;
  objects.renew(last);
  now += 60;
  EXPECT_EQ(objects.expire(), 1U);
  objects.renew(slow);
  objects.fetched(slow, two);
  objects.parted(last);
  now += 60;
  objects.renew(slow);
  now += 60;
  EXPECT_EQ(objects.expire(), 1U);
  EXPECT_EQ(objects.stats().objects, 1U) << "the other fetch is waited for";
}

TEST_F(Leases, WhatNobodyHereCanFetchNamesTheLastThatCould) {
  put(objects, step(1), 100, listed({{"trainer", {}}}));
  put(objects, step(1), 100, counted(2));
  objects.parted(objects.admit(trainer(0)));
  now += 101;
  objects.expire();
  const auto all = objects.list(0, 2, nullptr);
  const std::string gone = " (trainer 0, the last one here, did not come back)";
  EXPECT_EQ(all[0].waiting, std::vector<std::string>{"any trainer" + gone});
  EXPECT_EQ(all[1].waiting, std::vector<std::string>{"2 fetches by anyone" + gone});
  objects.admit({"critic", 0, 7});
  EXPECT_EQ(objects.list(0, 1, nullptr).at(0).waiting,
            std::vector<std::string>{"any trainer" + gone});
  EXPECT_EQ(objects.list(1, 1, nullptr).at(0).waiting,
            std::vector<std::string>{"2 fetches by anyone"});
}

TEST_F(Leases, AClaimPassesToTheNextIncarnation) {
  put(objects, step(1), 100, listed({{"trainer", 0}}));
  objects.parted(objects.admit(trainer(0, 1)));
  now += 60;
  objects.admit(trainer(0, 2));
  now += 60;
  EXPECT_EQ(objects.expire(), 1U);
  EXPECT_EQ(objects.stats().objects, 1U);
}

TEST_F(Leases, OneThatNeverConnectedKeepsItsClaimUntilTheScopeCloses) {
  put(objects, step(1), 100, listed({{"trainer", 0}}));
  now += 1'000'000;
  objects.expire();
  EXPECT_EQ(objects.stats().objects, 1U);
}

TEST_F(Leases, OneThatIsForgottenIsRefused) {
  const auto id = put(objects, step(1), 100).id;
  const auto consumer = objects.admit(trainer(0));
  objects.parted(consumer);
  now += 101;
  objects.expire();
  EXPECT_THROW(objects.fetch(consumer, id, {}), AccessRefused);
}

TEST(Mapped, AFreedObjectIsCountedUntilItsConsumerLetsGo) {
  Objects objects(kOwner);
  const auto id = put(objects, step(1), 1 << 20).id;
  const auto consumer = objects.admit(trainer(3));
  objects.mapped(consumer, id);
  EXPECT_EQ(objects.stats().mapped_bytes, 0U) << "it is still stored";
  const auto account = objects.close(step(1), kController);
  EXPECT_EQ(objects.stats().bytes, 0U);
  EXPECT_EQ(objects.stats().mapped_bytes, 1U << 20);
  ASSERT_EQ(account.still_mapped.size(), 1U);
  EXPECT_EQ(account.still_mapped[0].by, trainer(3));
  EXPECT_EQ(account.still_mapped[0].objects, 1U);
  EXPECT_EQ(account.still_mapped[0].bytes, 1U << 20);
  EXPECT_GT(account.still_mapped[0].since_ms, 0);
  objects.unmapped(consumer, id);
  EXPECT_EQ(objects.stats().mapped_bytes, 0U);
  EXPECT_TRUE(objects.account(step(1)).still_mapped.empty());
}

TEST(Mapped, SeveralMappingsOfOneConsumerAreCounted) {
  Objects objects(kOwner);
  const auto id = put(objects, step(1), 1 << 20).id;
  const auto consumer = objects.admit(trainer(3));
  objects.mapped(consumer, id);
  objects.mapped(consumer, id);
  objects.close(step(1), kController);
  objects.unmapped(consumer, id);
  EXPECT_EQ(objects.still_mapped().size(), 1U);
  objects.unmapped(consumer, id);
  EXPECT_TRUE(objects.still_mapped().empty());
}

TEST(Mapped, ConsumersThatMapOneObjectShareItsBytes) {
  Objects objects(kOwner);
  const auto id = put(objects, step(1), 1 << 20).id;
  for (int rank = 0; rank < 4; ++rank) {
    objects.mapped(objects.admit(trainer(rank)), id);
  }
  objects.close(step(1), kController);
  EXPECT_EQ(objects.still_mapped().size(), 4U);
  EXPECT_EQ(objects.stats().mapped_bytes, 1U << 20);
}

TEST(Mapped, TheLastConnectionsEndIsAnUnmap) {
  Objects objects(kOwner);
  const auto id = put(objects, step(1), 1 << 20).id;
  const auto consumer = objects.admit(trainer(3));
  objects.admit(trainer(3));
  objects.mapped(consumer, id);
  objects.close(step(1), kController);
  objects.parted(consumer);
  EXPECT_EQ(objects.still_mapped().size(), 1U) << "it has another connection";
  objects.parted(consumer);
  EXPECT_TRUE(objects.still_mapped().empty());
}

TEST(Mapped, OneThatWasFreedBeforeItIsSaidToBeMappedCounts) {
  Objects objects(kOwner);
  const auto consumer = objects.admit(trainer(3));
  for (int i = 0; i < 2; ++i) {
    const auto id = put(objects, step(1), 1 << 20).id;
    objects.free(id, kController);
    objects.mapped(consumer, id);
  }
  EXPECT_EQ(objects.stats().mapped_bytes, 2U << 20);
}

}  // namespace
}  // namespace tenure::store
