// Objects under many threads, and over many rounds.
#include "objects_fixture.h"
#include <tenure/core/quiet_thread.h>
#include <tenure/store/errors.h>
#include <tenure/store/objects.h>

#include <gtest/gtest.h>

#include <malloc.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <thread>

namespace tenure::store {
namespace {

constexpr int kScopes = 40;
constexpr int kPutters = 4;
constexpr int kPuts = 1200;  // of each putter

// 4 threads put, 2 fetch, 1 closes scopes behind their backs.
class Bustle {
 public:
  void run() {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kPutters; ++i) {
      threads.push_back(quiet_thread("a putter", [this, i] { put_all(i); }));
    }
    for (int i = 0; i < 2; ++i) {
      threads.push_back(quiet_thread("a fetcher", [this, i] { fetch_all(i); }));
    }
    threads.push_back(quiet_thread("a closer", [this] { close_all(); }));
  }

  Objects objects{kOwner, capped(uint64_t{1} << 30)};
  std::array<std::atomic<uint64_t>, kScopes> stored{};
  std::atomic<uint64_t> dropped{0};
  std::atomic<uint64_t> wrong{0};
  std::map<int, Account> accounts;  // by the closer

 private:
  struct Given {
    ObjectId id;
    uint64_t seed;
    uint64_t bytes;
  };

  void put_all(int putter) {
    for (int i = 0; i < kPuts; ++i) {
      const auto scope = current.load();
      const uint64_t bytes = i % 8 == 0 ? 100'000 : 500 + i;
      const uint64_t seed = putter * kPuts + i + 1;
      const auto call = "call " + std::to_string(i % 3);
      const auto who = i % 3 == 0   ? counted(1)
                       : i % 3 == 1 ? listed({{"trainer", 0}, {"trainer", 1}})
                                    : anyone();
      const auto placed = put(objects, step(scope), bytes, who, call, seed);
      if (!placed.unstored.empty()) {
        ++dropped;
        continue;
      }
      ++stored[scope];
      const std::lock_guard lock(mutex);
      given.push_back({placed.id, seed, bytes});
    }
    --putting;
  }

  void fetch_all(int rank) {
    const auto consumer = objects.admit(trainer(rank));
    for (size_t next = 0;;) {
      const bool last = putting.load() == 0;
      std::vector<Given> batch;
      {
        const std::lock_guard lock(mutex);
        batch.assign(given.begin() + static_cast<ptrdiff_t>(next), given.end());
      }
      next += batch.size();
      for (const auto& object : batch) {
        fetch(consumer, object);
      }
      if (last && batch.empty()) {
        return;
      }
      std::this_thread::yield();
    }
  }

  void fetch(ConsumerId consumer, const Given& object) {
    try {
      const auto fetched = objects.fetch(consumer, object.id, {});
      objects.mapped(consumer, object.id);
      wrong += read_whole(*fetched.content) == pattern(object.bytes, object.seed) ? 0 : 1;
      objects.fetched(consumer, object.id);
      objects.unmapped(consumer, object.id);
    } catch (const StaleHandle&) {
      return;  // fetched by the other, or its scope was closed
    }
  }

  void close_all() {
    for (int scope = 0; scope < kScopes; ++scope) {
      const uint64_t until = uint64_t{kPutters} * kPuts * (scope + 1) / kScopes;
      while (objects.stats().put_objects + dropped < until && putting.load() != 0) {
        std::this_thread::yield();
      }
      current = std::min(scope + 1, kScopes - 1);
      objects.begin_call(step(scope), "call 1");
      accounts[scope] = objects.close(step(scope), kController);
    }
  }

  std::atomic<int> current{0};
  std::atomic<int> putting{kPutters};
  std::mutex mutex;
  std::vector<Given> given;
};

TEST(ObjectsThreads, TheBooksAreExactOnEveryScopeWhateverRaces) {
  Bustle bustle;
  bustle.run();
  EXPECT_EQ(bustle.wrong, 0U);
  uint64_t all = 0;
  for (auto& [scope, account] : bustle.accounts) {
    EXPECT_EQ(account.difference, "") << scope;
    EXPECT_EQ(account.total.live, 0U) << scope;
    EXPECT_EQ(account.total.stored, bustle.stored[scope]) << scope;
    all += account.total.stored;
  }
  EXPECT_EQ(all + bustle.dropped, uint64_t{kPutters} * kPuts);
  EXPECT_EQ(bustle.objects.stats().objects, 0U);
  EXPECT_EQ(bustle.objects.stats().bytes, 0U);
}

TEST(ObjectsThreads, SpillersThatMeetLoseNothing) {
  Objects objects(kOwner, capped(2 << 20, WhenFull::spill));
  constexpr int kEach = 40;
  std::array<std::vector<ObjectId>, 3> ids;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.push_back(quiet_thread("a putter", [&, i] {
        for (int k = 0; k < kEach; ++k) {
          ids[i].push_back(
              put(objects, step(i), k % 2 == 0 ? 200'000 : 3000, anyone(), "", i * 100 + k + 1).id);
        }
      }));
    }
  }
  EXPECT_LE(objects.stats().bytes, 2U << 20);
  const auto reader = objects.admit(trainer(0));
  for (int i = 0; i < 3; ++i) {
    for (int k = 0; k < kEach; ++k) {
      ASSERT_EQ(read_whole(*objects.fetch(reader, ids[i][k], {}).content),
                pattern(k % 2 == 0 ? 200'000 : 3000, i * 100 + k + 1));
    }
  }
}

// A step in which much goes wrong: a fetch, a failed and repeated call, a consumer that is lost, a
// put that comes too late.
void troubled_step(Objects& objects, int n, int64_t& now) {
  const auto scope = step(n);
  const auto first = objects.admit(trainer(0));
  objects.begin_call(scope, "a");
  put(objects, scope, 200'000, anyone(), "a");
  objects.fail_call(scope, "a");
  objects.begin_call(scope, "a");
  const auto fetched = put(objects, scope, 200'000, listed({{"trainer", 0}}), "a").id;
  objects.fetch(first, fetched, {});
  objects.mapped(first, fetched);
  objects.fetched(first, fetched);
  objects.unmapped(first, fetched);
  put(objects, scope, 300, anyone(), "b");
  objects.begin_call(scope, "b");
  put(objects, scope, 300, anyone(), "b");
  put(objects, scope, 100'000, listed({{"trainer", 1}}), "b");
  objects.parted(objects.admit(trainer(1, n + 1)));
  now += 1000;
  objects.expire();
  const auto account = objects.close(scope, kController);
  ASSERT_EQ(account.difference, "");
  ASSERT_EQ(account.total.freed[static_cast<size_t>(Freed::expired)], 1U);
  ASSERT_NE(put(objects, scope, 300).unstored, "");
  objects.parted(first);
}

TEST(ObjectsRounds, FiveHundredTroubledStepsStayFlat) {
  int64_t now = 0;
  Limits limits;
  limits.lease_ms = 100;
  limits.clock = [&now] { return now; };
  Objects objects(kOwner, limits);
  const auto bytes = [] {
    ::malloc_trim(0);
    return resident("RssAnon:");
  };
  for (int n = 0; n < 50; ++n) {
    troubled_step(objects, n, now);
  }
  const auto before = bytes();
  for (int n = 50; n < 550; ++n) {
    troubled_step(objects, n, now);
  }
  // The books of the closed scopes, and the table's words on what was freed: about 2 KB a step.
  if (!kSanitized) {
    EXPECT_LE(bytes() - before, 500 * 3000);
  }
  EXPECT_EQ(objects.stats().bytes, 0U);
  EXPECT_EQ(objects.stats().objects, 0U);
  EXPECT_EQ(memfd_bytes(), 0);
}

}  // namespace
}  // namespace tenure::store
