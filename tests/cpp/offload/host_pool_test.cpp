#include <tenure/offload/host_pool.h>

#include "later.h"
#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <map>
#include <memory>
#include <random>

namespace tenure::offload {
namespace {

using test::Later;

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

HostPool::Source plain(bool rounds_up = false) {
  auto source = host_memory_for(c10::DeviceType::CPU);
  source.rounds_up = rounds_up;
  if (rounds_up) {
    source.allocate = [allocate = source.allocate](size_t bytes) {
      EXPECT_TRUE(std::has_single_bit(bytes)) << bytes;
      return allocate(bytes);
    };
  }
  return source;
}

size_t total(const std::vector<HostPool::Piece>& pieces) {
  size_t bytes = 0;
  for (const auto& piece : pieces) {
    bytes += piece.bytes;
  }
  return bytes;
}

void give(HostPool& pool, std::vector<HostPool::Piece> pieces) {
  for (auto& piece : pieces) {
    pool.give(std::move(piece));
  }
}

TEST(HostPool, TakesWhatIsAsked) {
  HostPool pool(plain(), kNoLimit);
  auto pieces = pool.take(10'000);
  EXPECT_GE(total(pieces), 10'000U);
  EXPECT_EQ(pool.held(), total(pieces));
  give(pool, std::move(pieces));
  EXPECT_EQ(pool.held(), 0U);
}

TEST(HostPool, SecondRoundTakesNothingNew) {
  HostPool pool(plain(true), kNoLimit);
  const std::vector<size_t> sizes{5'000'000, 70'000, 3'333'333, 512, 1 << 20};
  for (int round = 0; round < 3; ++round) {
    std::vector<std::vector<HostPool::Piece>> held;
    for (const auto size : sizes) {
      held.push_back(pool.take(size));
    }
    for (auto& pieces : held) {
      give(pool, std::move(pieces));
    }
    static uint64_t first = 0;
    first = round == 0 ? pool.slabs_taken() : first;
    EXPECT_EQ(pool.slabs_taken(), first);
  }
}

TEST(HostPool, WhatIsTakenIsWhatIsHeld) {
  HostPool pool(plain(true), kNoLimit);
  std::mt19937 dice(1);
  std::vector<std::vector<HostPool::Piece>> held;
  for (int i = 0; i < 200; ++i) {
    held.push_back(pool.take(100'000 + dice() % 3'000'000));
  }
  EXPECT_LE(static_cast<double>(pool.pinned()), 1.05 * static_cast<double>(pool.held()));
}

TEST(HostPool, PiecesDoNotOverlap) {
  HostPool pool(plain(true), kNoLimit);
  std::mt19937 dice(2);
  std::vector<std::vector<HostPool::Piece>> held;
  std::map<const char*, size_t> used;
  const auto check = [&](const std::vector<HostPool::Piece>& pieces) {
    for (const auto& piece : pieces) {
      auto next = used.upper_bound(piece.data);
      EXPECT_TRUE(next == used.end() || piece.data + piece.bytes <= next->first);
      EXPECT_TRUE(next == used.begin() ||
                  std::prev(next)->first + std::prev(next)->second <= piece.data);
      used.emplace(piece.data, piece.bytes);
    }
  };
  for (int i = 0; i < 2000; ++i) {
    if (held.empty() || dice() % 2 == 0) {
      held.push_back(pool.take(1 + dice() % 100'000));
      check(held.back());
    } else {
      const auto at = held.begin() + static_cast<int64_t>(dice() % held.size());
      for (const auto& piece : *at) {
        used.erase(piece.data);
      }
      give(pool, std::move(*at));
      held.erase(at);
    }
  }
}

enum class Way : uint8_t { out, back };

// Two neighbours of one slab, the copies to or from which were queued in this order.
struct Neighbours {
  Neighbours(HostPool& pool, Way way) {
    auto slab = pool.take(8192);
    EXPECT_EQ(slab.size(), 1U);
    const auto piece = [&](char* data, const std::shared_ptr<Later>& done) {
      HostPool::Busy busy;
      (way == Way::out ? busy.out : busy.back) = Fence(done);
      (way == Way::out ? busy.out_order : busy.back_order) = pool.next_order();
      return HostPool::Piece{data, 4096, busy};
    };
    first = piece(slab[0].data, older);
    second = piece(slab[0].data + 4096, younger);
  }
  std::shared_ptr<Later> older = std::make_shared<Later>();
  std::shared_ptr<Later> younger = std::make_shared<Later>();
  HostPool::Piece first;
  HostPool::Piece second;
};

TEST(HostPool, JoinedNeighboursWaitForTheYoungerFence) {
  for (const auto way : {Way::out, Way::back}) {
    for (const bool younger_first : {false, true}) {
      HostPool pool(plain(), kNoLimit);
      Neighbours two(pool, way);
      pool.give(younger_first ? two.second : two.first);
      pool.give(younger_first ? two.first : two.second);
      const auto again = pool.take(8192);
      ASSERT_EQ(again.size(), 1U);
      *two.older->done = true;
      EXPECT_FALSE(again[0].busy.ready());
      *two.younger->done = true;
      EXPECT_TRUE(again[0].busy.ready());
    }
  }
}

TEST(HostPool, ItsEndWaitsForTheCopiesThatUseIt) {
  for (const auto way : {Way::out, Way::back}) {
    std::shared_ptr<Later> last;
    {
      HostPool pool(plain(), kNoLimit);
      const Neighbours two(pool, way);
      pool.give(two.first);
      pool.give(two.second);
      last = two.younger;
    }
    EXPECT_TRUE(last->ready());
  }
}

TEST(HostPool, WhereCopiesHaveNoOrderNeighboursJoinWhenTheyAreReady) {
  auto source = plain();
  source.in_order = false;
  HostPool pool(std::move(source), kNoLimit);
  Neighbours two(pool, Way::back);
  pool.give(two.first);
  pool.give(two.second);
  auto apart = pool.take(8192);
  EXPECT_EQ(apart.size(), 2U);
  give(pool, std::move(apart));
  *two.older->done = true;
  *two.younger->done = true;
  pool.shrink();
  const auto again = pool.take(8192);
  ASSERT_EQ(again.size(), 1U);
  EXPECT_TRUE(again[0].busy.ready());
}

TEST(HostPool, LimitIsKeptAndSaid) {
  HostPool pool(plain(), 1 << 20);
  auto pieces = pool.take(1 << 19);
  try {
    pool.take(1 << 20);
    FAIL() << "took more than the limit";
  } catch (const BudgetError& error) {
    EXPECT_NE(std::string(error.what()).find("host limit is 1.0 MiB"), std::string::npos)
        << error.what();
  }
  EXPECT_LE(pool.pinned(), uint64_t{1} << 20);
  EXPECT_EQ(pool.held(), uint64_t{1} << 19);
}

TEST(HostPool, ShrinksToWhatWasNeeded) {
  HostPool pool(plain(true), kNoLimit);
  auto large = pool.take(64 << 20);
  auto small = pool.take(1 << 20);
  give(pool, std::move(large));
  pool.shrink();
  EXPECT_GE(pool.pinned(), uint64_t{64} << 20);  // it was needed since the last look
  pool.shrink();
  EXPECT_LE(pool.pinned(), uint64_t{2} << 20);
  give(pool, std::move(small));
}

TEST(HostPool, MemoryInUseByACopyIsNotGivenBack) {
  HostPool pool(plain(), kNoLimit);
  auto pieces = pool.take(1 << 20);
  const auto copy = std::make_shared<Later>();
  pieces[0].busy.out = Fence(copy);
  give(pool, std::move(pieces));
  pool.shrink();
  pool.shrink();
  EXPECT_EQ(pool.pinned(), uint64_t{1} << 20);
  *copy->done = true;
  pool.shrink();
  EXPECT_EQ(pool.pinned(), 0U);
}

}  // namespace
}  // namespace tenure::offload
