#include <tenure/inspect/size_table.h>

#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

namespace tenure::inspect {
namespace {

const void* block(uintptr_t number) {
  return reinterpret_cast<const void*>(number << 6U);  // NOLINT(performance-no-int-to-ptr)
}

TEST(SizeTableTest, ABlockIsKnownUntilItIsTaken) {
  SizeTable table;
  table.add(block(1), 100);
  EXPECT_EQ(table.take(block(2)), std::nullopt);
  EXPECT_EQ(table.take(block(1)), 100);
  EXPECT_EQ(table.take(block(1)), std::nullopt);
}

TEST(SizeTableTest, ItIsAMapWhateverComesAndGoes) {
  SizeTable table;
  std::unordered_map<uintptr_t, uint64_t> expected;
  std::mt19937 draw(0);
  for (uint64_t i = 0; i < 300'000; ++i) {
    const uintptr_t number = 1 + draw() % 5000;
    const auto found = expected.find(number);
    if (found == expected.end()) {
      EXPECT_EQ(table.take(block(number)), std::nullopt);
      table.add(block(number), i);
      expected.emplace(number, i);
    } else {
      ASSERT_EQ(table.take(block(number)), found->second);
      expected.erase(found);
    }
  }
}

TEST(SizeTableTest, ThreadsDoNotLoseEachOthersBlocks) {
  SizeTable table;
  std::vector<std::jthread> threads;
  for (uintptr_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (uintptr_t i = 1; i < 20'000; ++i) {
        table.add(block(4 * i + thread), i);
      }
      for (uintptr_t i = 1; i < 20'000; ++i) {
        EXPECT_EQ(table.take(block(4 * i + thread)), i);
      }
    });
  }
}

TEST(SizeTableTest, ABlockTakesFewBytes) {
  SizeTable table;
  for (uintptr_t i = 1; i <= 100'000; ++i) {
    table.add(block(i), i);
  }
  EXPECT_LT(table.footprint(), 100'000 * 64);
}

}  // namespace
}  // namespace tenure::inspect
