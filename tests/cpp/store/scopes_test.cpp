#include "objects_fixture.h"
#include <tenure/core/error.h>
#include <tenure/store/ledger.h>
#include <tenure/store/objects.h>

#include <gtest/gtest.h>

namespace tenure::store {
namespace {

TEST(Scopes, ClosingFreesAllThatTheScopeOwnsAndNothingElse) {
  Objects objects(kOwner);
  put(objects, step(1), 100);
  put(objects, step(1), 1 << 20, listed({{"trainer", 0}}));
  put(objects, step(2), 100);
  const auto account = objects.close(step(1), kController);
  EXPECT_EQ(account.total.freed[static_cast<size_t>(Freed::closed)], 2U);
  EXPECT_EQ(account.total.live, 0U);
  EXPECT_EQ(account.difference, "");
  EXPECT_EQ(objects.scopes(), std::vector<ScopeName>{step(2)});
}

TEST(Scopes, APutAfterTheCloseIsDroppedByItsWord) {
  Objects objects(kOwner);
  put(objects, step(1), 100);
  objects.close(step(1), kController);
  const auto late = put(objects, step(1), 100);
  EXPECT_TRUE(late.unstored.starts_with("step 1 was closed by controller 0 at 20"))
      << late.unstored;
  EXPECT_EQ(objects.stats().objects, 0U);
  EXPECT_EQ(objects.stats().dropped, 1U);
  EXPECT_EQ(objects.account(step(1)).dropped, 1U);
}

TEST(Scopes, AScopeThatNeverHadAnObjectLeavesItsWordToo) {
  Objects objects(kOwner);
  objects.close(step(1), kController);
  EXPECT_NE(put(objects, step(1), 100).unstored, "");
}

TEST(Scopes, TheFirstCloseIsTheOneThatIsRemembered) {
  Objects objects(kOwner);
  put(objects, step(1), 100);
  objects.close(step(1), kController);
  const auto again = objects.close(step(1), trainer(3));
  EXPECT_EQ(again.total.stored, 1U);
  EXPECT_NE(put(objects, step(1), 100).unstored.find("controller 0"), std::string::npos);
}

// A name of its own for each number, in which there is no number.
ScopeName lettered(int number) {
  ScopeName out{.kind = "call", .id = ""};
  for (; number > 0; number /= 16) {
    out.id += static_cast<char>('a' + (number % 16));
  }
  return out;
}

TEST(Scopes, NumbersAreRememberedForEverAndOfOtherNamesTheLatest) {
  Objects objects(kOwner);
  for (int i = 0; i <= static_cast<int>(kClosedNames); ++i) {
    objects.close(step(i), kController);
    objects.close(lettered(i), kController);
  }
  EXPECT_EQ(put(objects, step(0), 10).unstored, "step 0 was closed long ago");
  EXPECT_NE(put(objects, step(static_cast<int>(kClosedNames)), 10).unstored.find("controller 0"),
            std::string::npos);
  EXPECT_EQ(put(objects, lettered(0), 10).unstored, "");
  EXPECT_NE(put(objects, lettered(static_cast<int>(kClosedNames)), 10).unstored, "");
  EXPECT_EQ(objects.stats().dropped, 3U);
}

TEST(Scopes, ACallThatIsBegunAgainReplacesWhatItPut) {
  Objects objects(kOwner);
  objects.begin_call(step(1), "a");
  put(objects, step(1), 100, anyone(), "a");
  put(objects, step(1), 100, anyone(), "b");
  objects.begin_call(step(1), "a");
  put(objects, step(1), 100, anyone(), "a");
  const auto account = objects.account(step(1));
  EXPECT_EQ(account.total.freed[static_cast<size_t>(Freed::replaced)], 1U);
  EXPECT_EQ(account.total.live, 2U);
}

TEST(Scopes, ACallThatFailedLeavesNothing) {
  Objects objects(kOwner);
  put(objects, step(1), 100, anyone(), "a");
  put(objects, step(2), 100, anyone(), "a");
  objects.fail_call(step(1), "a");
  EXPECT_EQ(objects.scopes(), std::vector<ScopeName>{step(2)});
}

TEST(Scopes, APutThatItsCallOvertakesIsNotStored) {
  Objects objects(kOwner);
  objects.begin_call(step(1), "a");
  const auto placed =
      objects.put(terms(step(1), 100, anyone(), "a"), 100,
                  [&](uint64_t, std::span<std::byte>) { objects.begin_call(step(1), "a"); });
  EXPECT_EQ(placed.unstored, "call a was begun again or failed meanwhile");
  EXPECT_EQ(objects.stats().bytes, 0U);
}

TEST(Scopes, APutThatItsCloseOvertakesIsDropped) {
  Objects objects(kOwner);
  const auto placed =
      objects.put(terms(step(1), 200'000), 200'000,
                  [&](uint64_t, std::span<std::byte>) { objects.close(step(1), kController); });
  EXPECT_NE(placed.unstored.find("was closed by"), std::string::npos);
  EXPECT_EQ(objects.stats().bytes, 0U);
}

TEST(Scopes, TheAccountHasALineForEachCallAndSite) {
  Objects objects(kOwner);
  objects.put(terms(step(1), 10, anyone(), "a", "x.py:1"), pattern(10));
  objects.put(terms(step(1), 20, anyone(), "a", "x.py:2"), pattern(20));
  objects.put(terms(step(1), 20, anyone(), "a", "x.py:2"), pattern(20));
  const auto account = objects.account(step(1));
  ASSERT_EQ(account.lines.size(), 2U);
  EXPECT_EQ(account.lines[1].site, "x.py:2");
  EXPECT_EQ(account.lines[1].tally.live, 2U);
  EXPECT_EQ(account.lines[1].tally.live_bytes, 40U);
  EXPECT_EQ(account.total.stored_bytes, 50U);
  EXPECT_EQ(account.difference, "");
}

TEST(Scopes, TheBooksOfAClosedScopeAreKept) {
  Objects objects(kOwner);
  put(objects, step(1), 10, anyone(), "a");
  objects.close(step(1), kController);
  const auto account = objects.account(step(1));
  ASSERT_EQ(account.lines.size(), 1U);
  EXPECT_EQ(account.lines[0].tally.freed_bytes[static_cast<size_t>(Freed::closed)], 10U);
}

TEST(Scopes, ADifferenceIsNamed) {
  AccountLine right{"a", "x.py:1", {}};
  right.tally.stored = right.tally.live = 1;
  right.tally.stored_bytes = right.tally.live_bytes = 8;
  AccountLine wrong{"b", "x.py:2", {}};
  wrong.tally.stored = 3;
  wrong.tally.live = 1;
  wrong.tally.freed[0] = 1;
  EXPECT_EQ(difference_of({right}), "");
  const auto named = difference_of({right, wrong});
  EXPECT_EQ(named.find("call a"), std::string::npos);
  EXPECT_NE(named.find("call b at x.py:2: stored 3 (0 B), freed 1 (0 B), live 1"),
            std::string::npos)
      << named;
}

TEST(Scopes, ANameThatCannotBeOneIsRefused) {
  Objects objects(kOwner);
  EXPECT_THROW(put(objects, {"", "1"}, 10), InputError);
}

}  // namespace
}  // namespace tenure::store
