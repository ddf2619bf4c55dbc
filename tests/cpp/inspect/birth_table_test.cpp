#include <tenure/inspect/birth_table.h>

#include <gtest/gtest.h>

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace tenure::inspect {
namespace {

constexpr OriginId kOrigin{3};
constexpr uint32_t kThread = 42;

const void* address(uint64_t number) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): nothing lies there
  return reinterpret_cast<const void*>(uintptr_t{0x10000} + number * 64);
}

void bear(BirthTable& table, uint64_t number, uint64_t bytes, uint32_t step = 0) {
  table.born(address(number), bytes, step, kOrigin, kThread);
}

int64_t heap_bytes() {
  const auto heap = mallinfo2();
  return static_cast<int64_t>(heap.uordblks + heap.hblkhd);
}

// A sanitizer's malloc is not the one that mallinfo2() knows.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kOtherMalloc = true;
#else
constexpr bool kOtherMalloc = false;
#endif

TEST(BirthTable, ABirthIsFoundAsItWas) {
  BirthTable table;
  bear(table, 1, 1024, 7);
  const auto birth = table.find(address(1));
  ASSERT_TRUE(birth);
  EXPECT_EQ(birth->data, address(1));
  EXPECT_EQ(birth->bytes, 1024);
  EXPECT_EQ(birth->step, 7);
  EXPECT_EQ(birth->origin, kOrigin);
  EXPECT_EQ(birth->thread, kThread);
  EXPECT_NE(birth->id, 0);
  EXPECT_FALSE(table.find(address(2)));
}

TEST(BirthTable, ADeathGivesTheBytesOnce) {
  BirthTable table;
  bear(table, 1, 1024);
  EXPECT_EQ(table.died(address(1), 1), 1024);
  EXPECT_EQ(table.died(address(1), 1), std::nullopt);
  EXPECT_FALSE(table.find(address(1)));
}

TEST(BirthTable, FlowAddsUp) {
  BirthTable table;
  bear(table, 1, 100);
  bear(table, 2, 200);
  bear(table, 3, 400);
  table.died(address(2), 0);
  table.died(address(9), 0);
  const auto flow = table.flow();
  EXPECT_EQ(flow.bytes, 500);
  EXPECT_EQ(flow.count, 2);
  EXPECT_EQ(flow.births, 3);
  EXPECT_EQ(flow.born_bytes, 700);
  EXPECT_EQ(flow.deaths, 1);
  EXPECT_EQ(flow.untold, 0);
}

TEST(BirthTable, ThePeakIsOfTheInterval) {
  BirthTable table;
  bear(table, 1, 100);
  bear(table, 2, 200);
  table.died(address(2), 0);
  bear(table, 3, 50);
  EXPECT_EQ(table.flow().peak, 300);
  table.start_interval();
  EXPECT_EQ(table.flow().peak, 150);
  bear(table, 4, 10);
  EXPECT_EQ(table.flow().peak, 160);
}

TEST(BirthTable, CountedBytesAreAliveWithoutABirth) {
  BirthTable table;
  table.count(1000);
  table.count(-400);
  const auto flow = table.flow();
  EXPECT_EQ(flow.bytes, 600);
  EXPECT_EQ(flow.peak, 1000);
  EXPECT_EQ(flow.count, 0);
  EXPECT_EQ(flow.births, 0);
}

TEST(BirthTable, AnAddressUsedAgainHasANewId) {
  BirthTable table;
  bear(table, 1, 100);
  const auto first = table.find(address(1))->id;
  table.died(address(1), 0);
  bear(table, 1, 200);
  EXPECT_NE(table.find(address(1))->id, first);
  EXPECT_EQ(table.find(address(1))->bytes, 200);
}

TEST(BirthTable, AliveAreThoseThatDidNotDie) {
  BirthTable table;
  for (uint64_t i = 0; i < 5000; ++i) {
    bear(table, i, i);
  }
  for (uint64_t i = 0; i < 5000; i += 2) {
    table.died(address(i), 0);
  }
  std::set<const void*> alive;
  for (const auto& birth : table.alive()) {
    alive.insert(birth.data);
    EXPECT_EQ(birth.bytes % 2, 1);
  }
  EXPECT_EQ(alive.size(), 2500);
}

TEST(BirthTable, WhatWasBeforeStepsWereCountedWasInTheFirst) {
  BirthTable table;
  table.tell(true);
  bear(table, 1, 8, 70);
  bear(table, 2, 8, 80);
  table.died(address(2), 90);
  table.restart_steps();
  bear(table, 3, 8, 1);
  EXPECT_EQ(table.find(address(1))->step, 0);
  EXPECT_EQ(table.find(address(3))->step, 1);
  const auto deaths = table.drain().deaths;
  ASSERT_EQ(deaths.size(), 1);
  EXPECT_EQ(deaths[0].birth.step, 0);
  EXPECT_EQ(deaths[0].step, 0);
}

TEST(BirthTable, NothingIsToldUnlessAskedFor) {
  BirthTable table;
  bear(table, 1, 100);
  table.died(address(1), 0);
  const auto changes = table.drain();
  EXPECT_TRUE(changes.births.empty());
  EXPECT_TRUE(changes.deaths.empty());
}

TEST(BirthTable, ABirthIsToldOnceAndItsDeathSaysSo) {
  BirthTable table;
  table.tell(true);
  bear(table, 1, 100, 5);
  auto changes = table.drain();
  ASSERT_EQ(changes.births.size(), 1);
  EXPECT_TRUE(changes.deaths.empty());
  const auto id = changes.births[0].id;
  EXPECT_TRUE(table.drain().births.empty());

  table.died(address(1), 9);
  changes = table.drain();
  EXPECT_TRUE(changes.births.empty());
  ASSERT_EQ(changes.deaths.size(), 1);
  EXPECT_EQ(changes.deaths[0].birth.id, id);
  EXPECT_EQ(changes.deaths[0].birth.step, 5);
  EXPECT_EQ(changes.deaths[0].step, 9);
  EXPECT_TRUE(changes.deaths[0].told);
  EXPECT_GE(changes.deaths[0].died, changes.deaths[0].birth.born);
  EXPECT_TRUE(table.drain().deaths.empty());
}

TEST(BirthTable, ALifeBetweenTwoDrainsIsADeathOnly) {
  BirthTable table;
  table.tell(true);
  bear(table, 1, 100);
  table.died(address(1), 0);
  const auto changes = table.drain();
  EXPECT_TRUE(changes.births.empty());
  ASSERT_EQ(changes.deaths.size(), 1);
  EXPECT_FALSE(changes.deaths[0].told);
  EXPECT_EQ(changes.deaths[0].birth.bytes, 100);
}

TEST(BirthTable, ADeathOfABirthBeforeTheTellingIsNotOfOneThatWasTold) {
  BirthTable table;
  bear(table, 1, 100);
  table.tell(true);
  EXPECT_TRUE(table.drain().births.empty());
  table.died(address(1), 0);
  const auto changes = table.drain();
  ASSERT_EQ(changes.deaths.size(), 1);
  EXPECT_FALSE(changes.deaths[0].told);
}

TEST(BirthTable, AnAddressUsedAgainBetweenDrainsIsOneBirthAndOneDeath) {
  BirthTable table;
  table.tell(true);
  bear(table, 1, 100);
  table.died(address(1), 0);
  bear(table, 1, 200);
  const auto changes = table.drain();
  ASSERT_EQ(changes.births.size(), 1);
  EXPECT_EQ(changes.births[0].bytes, 200);
  ASSERT_EQ(changes.deaths.size(), 1);
  EXPECT_EQ(changes.deaths[0].birth.bytes, 100);
  EXPECT_NE(changes.births[0].id, changes.deaths[0].birth.id);
}

TEST(BirthTable, AReaderThatDoesNotComeMissesDeathsButNoneIsUncounted) {
  constexpr uint64_t kLives = 100'000;
  BirthTable table;
  table.tell(true);
  for (uint64_t i = 0; i < kLives; ++i) {
    bear(table, 1, 64);
    table.died(address(1), 0);
  }
  const auto flow = table.flow();
  EXPECT_EQ(flow.deaths, kLives);
  EXPECT_GT(flow.untold, 0);
  EXPECT_EQ(table.drain().deaths.size() + flow.untold, kLives);
}

TEST(BirthTable, AReaderThatDoesNotComeCostsNoMoreAndMoreMemory) {
  if (kOtherMalloc) {
    GTEST_SKIP() << "needs glibc's malloc";
  }
  constexpr uint64_t kLives = 1'000'000;
  BirthTable table;
  table.tell(true);
  const auto live = [&] {
    for (uint64_t i = 0; i < kLives; ++i) {
      bear(table, 1, 64);
      table.died(address(1), 0);
    }
  };
  live();
  const auto before = heap_bytes();
  live();
  EXPECT_LT(heap_bytes() - before, 100'000);
}

TEST(BirthTable, AMillionBirthsCostAtMostTwoHundredBytesEach) {
  if (kOtherMalloc) {
    GTEST_SKIP() << "needs glibc's malloc";
  }
  constexpr int64_t kBirths = 1'000'000;
  BirthTable table;
  table.tell(true);
  const auto before = heap_bytes();
  for (int64_t i = 0; i < kBirths; ++i) {
    bear(table, static_cast<uint64_t>(i), 64);
  }
  const auto spent = heap_bytes() - before;
  EXPECT_LE(spent, 200 * kBirths);
  EXPECT_GE(spent, static_cast<int64_t>(sizeof(Birth)) * kBirths) << "the measure does not work";
}

TEST(BirthTable, SlotsOfTheDeadAreUsedAgain) {
  if (kOtherMalloc) {
    GTEST_SKIP() << "needs glibc's malloc";
  }
  BirthTable table;
  const auto live = [&](uint64_t first) {
    for (uint64_t i = first; i < first + 1000; ++i) {
      bear(table, i, 64);
    }
    for (uint64_t i = first; i < first + 1000; ++i) {
      table.died(address(i), 0);
    }
  };
  live(0);
  const auto before = heap_bytes();
  for (uint64_t round = 1; round < 200; ++round) {
    live(round * 1000);
  }
  // Rounds are spread over the shards unevenly, so some get another chunk or two.
  EXPECT_LT(heap_bytes() - before, 4'000'000);
  EXPECT_EQ(table.flow().count, 0);
}

// What one thread did, kept to be compared.
struct Did {
  uint64_t births = 0, born_bytes = 0, deaths = 0;
  int64_t bytes = 0;
};

Did live_at_random(BirthTable& table, uint64_t thread) {
  Did did;
  std::mt19937_64 random(thread);
  std::vector<std::pair<uint64_t, uint64_t>> alive;  // number, bytes
  std::vector<uint64_t> free;
  uint64_t next = 0;
  for (int i = 0; i < 50'000; ++i) {
    if (alive.empty() || random() % 100 < 52) {
      uint64_t number = 0;
      if (free.empty()) {
        number = thread + 8 * next++;
      } else {
        number = free.back();
        free.pop_back();
      }
      const auto bytes = random() % 10'000;
      table.born(address(number), bytes, static_cast<uint32_t>(i), kOrigin, kThread);
      alive.emplace_back(number, bytes);
      ++did.births;
      did.born_bytes += bytes;
      did.bytes += static_cast<int64_t>(bytes);
    } else {
      std::swap(alive[random() % alive.size()], alive.back());
      const auto [number, bytes] = alive.back();
      alive.pop_back();
      EXPECT_EQ(table.died(address(number), static_cast<uint32_t>(i)), bytes);
      free.push_back(number);
      ++did.deaths;
      did.bytes -= static_cast<int64_t>(bytes);
    }
  }
  return did;
}

TEST(BirthTable, EightThreadsAtRandomKeepTotalsExact) {
  BirthTable table;
  table.tell(true);
  std::vector<Did> did(8);
  std::vector<Changes> told;
  {
    std::jthread reader([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        told.push_back(table.drain());
        static_cast<void>(table.flow());
        static_cast<void>(table.alive());
      }
    });
    std::vector<std::jthread> threads;
    for (uint64_t thread = 0; thread < did.size(); ++thread) {
      threads.emplace_back([&, thread] { did[thread] = live_at_random(table, thread); });
    }
    threads.clear();
  }
  told.push_back(table.drain());

  Did sum;
  for (const auto& one : did) {
    sum.births += one.births;
    sum.born_bytes += one.born_bytes;
    sum.deaths += one.deaths;
    sum.bytes += one.bytes;
  }
  const auto flow = table.flow();
  EXPECT_EQ(flow.births, sum.births);
  EXPECT_EQ(flow.born_bytes, sum.born_bytes);
  EXPECT_EQ(flow.deaths, sum.deaths);
  EXPECT_EQ(flow.bytes, sum.bytes);
  EXPECT_EQ(flow.count, static_cast<int64_t>(sum.births - sum.deaths));
  EXPECT_GE(flow.peak, flow.bytes);
  EXPECT_EQ(table.alive().size(), sum.births - sum.deaths);

  std::set<uint64_t> born;
  uint64_t deaths = 0;
  for (const auto& changes : told) {
    for (const auto& birth : changes.births) {
      EXPECT_TRUE(born.insert(birth.id).second) << "told twice";
    }
    for (const auto& death : changes.deaths) {
      EXPECT_EQ(born.insert(death.birth.id).second, !death.told);
      ++deaths;
    }
  }
  EXPECT_EQ(deaths + flow.untold, sum.deaths);
  if (flow.untold == 0) {
    EXPECT_EQ(born.size(), sum.births);
  }
}

}  // namespace
}  // namespace tenure::inspect
