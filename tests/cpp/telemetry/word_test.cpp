#include <tenure/telemetry/word.h>

#include <tenure/telemetry/layout.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

namespace tenure::telemetry {
namespace {

constexpr Key kHighest{"most_bytes", Unit::bytes, Extreme::highest, false, ""};
constexpr Key kLowest{"left_bytes", Unit::bytes, Extreme::lowest, false, ""};
constexpr Key kSigned{"growth", Unit::bytes_per_step, Extreme::highest, true, ""};
constexpr Key kLowestSigned{"shrinks", Unit::bytes_per_step, Extreme::lowest, true, ""};

// What a reduction over ranks 0, 1 … with these figures says.
std::optional<Found> reduced(const Key& key, const std::vector<std::optional<int64_t>>& figures) {
  int64_t most = kNoWord;
  for (uint32_t rank = 0; rank < figures.size(); ++rank) {
    most = std::max(most, pack(key, figures[rank], rank));
  }
  return unpack(key, most);
}

TEST(Word, EveryValueOfTheRangeIsExact) {
  for (const int64_t value : {int64_t{0}, int64_t{1}, int64_t{4095}, kMostValue - 1, kMostValue}) {
    for (const uint32_t rank : {0U, 1U, 16'383U, kMostRanks - 1}) {
      EXPECT_EQ(unpack(kHighest, pack(kHighest, value, rank)), (Found{value, rank}));
      EXPECT_EQ(unpack(kLowest, pack(kLowest, value, rank)), (Found{value, rank}));
      EXPECT_GE(pack(kHighest, value, rank), 0) << "the maximum is of signed integers";
    }
  }
  for (const int64_t value : {-kBias, int64_t{-1}, int64_t{0}, int64_t{1}, kBias - 1}) {
    EXPECT_EQ(unpack(kSigned, pack(kSigned, value, 7)), (Found{value, 7}));
    EXPECT_EQ(unpack(kLowestSigned, pack(kLowestSigned, value, 7)), (Found{value, 7}));
  }
}

TEST(Word, WhatIsBeyondTheRangeIsTheMostOrTheLeast) {
  EXPECT_EQ(unpack(kHighest, pack(kHighest, kMostValue + 1, 3))->value, kMostValue);
  EXPECT_EQ(unpack(kHighest, pack(kHighest, INT64_MAX, 3))->value, kMostValue);
  EXPECT_EQ(unpack(kHighest, pack(kHighest, -5, 3))->value, 0);
  EXPECT_EQ(unpack(kSigned, pack(kSigned, INT64_MIN, 3))->value, -kBias);
  EXPECT_EQ(unpack(kSigned, pack(kSigned, INT64_MAX, 3))->value, kBias - 1);
}

TEST(Word, TheExtremeWinsAndOfEqualOnesTheLowestRank) {
  EXPECT_EQ(reduced(kHighest, {5, 9, 9, 2}), (Found{9, 1}));
  EXPECT_EQ(reduced(kLowest, {500, 3, 3, 900}), (Found{3, 1}));
  EXPECT_EQ(reduced(kSigned, {-5, -7, -5}), (Found{-5, 0}));
  EXPECT_EQ(reduced(kLowestSigned, {-5, -7, -5}), (Found{-7, 1}));
  EXPECT_EQ(reduced(kHighest, {0, 0}), (Found{0, 0}));
  EXPECT_EQ(reduced(kHighest, {kMostValue, kMostValue + 7}), (Found{kMostValue, 0}));
}

TEST(Word, AbsentLosesAgainstEverything) {
  EXPECT_EQ(reduced(kHighest, {std::nullopt, 0}), (Found{0, 1}));
  EXPECT_EQ(reduced(kLowest, {std::nullopt, kMostValue}), (Found{kMostValue, 1}));
  EXPECT_EQ(reduced(kSigned, {std::nullopt, -kBias}), (Found{-kBias, 1}));
  EXPECT_EQ(reduced(kLowest, {std::nullopt, std::nullopt}), std::nullopt);
}

TEST(Layout, EveryKeyHasItsNameAndItsPlace) {
  for (size_t i = 0; i < kKeys; ++i) {
    EXPECT_FALSE(keys()[i].name.empty());
    EXPECT_FALSE(keys()[i].help.empty());
    EXPECT_EQ(key_named(keys()[i].name), static_cast<K>(i));
  }
  EXPECT_EQ(keys()[static_cast<size_t>(K::step_time)].name, "step_microseconds");
  EXPECT_EQ(keys()[static_cast<size_t>(K::host_rss)].name, "host_rss_bytes");
  EXPECT_EQ(keys()[static_cast<size_t>(K::steps_left)].name, "steps_left");
  EXPECT_EQ(key_named("nonsense"), std::nullopt);
}

TEST(Layout, ARankSpeaksForAllAndForItsStage) {
  Row row;
  row.set(K::host_rss, 100);
  std::vector<int64_t> words(words_of(3));
  write_words(row, 5, 1, words);
  const auto found = read_words(words);
  const auto at = [&](size_t slot) {
    return found[slot * kKeys + static_cast<size_t>(K::host_rss)];
  };
  EXPECT_EQ(at(0), (Found{100, 5}));
  EXPECT_EQ(at(1), std::nullopt);
  EXPECT_EQ(at(2), (Found{100, 5}));
  EXPECT_EQ(at(3), std::nullopt);
  EXPECT_EQ(std::ranges::count_if(found, [](const auto& one) { return one.has_value(); }), 2);
}

// The maximum of all words is the figure of each slot, whatever the number of ranks.
TEST(Layout, SixteenThousandRanksInSixtyFourStages) {
  constexpr uint32_t kRanks = 16'384;
  constexpr uint32_t kStages = 64;
  const auto rss = [](uint32_t rank) { return int64_t{rank} * 2'654'435'761 % 1'000'003; };
  std::vector<int64_t> all(words_of(kStages), kNoWord);
  std::vector<int64_t> one(all.size());
  std::array<Found, kStages + 1> expected{};
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    Row row;
    row.set(K::host_rss, rss(rank));
    row.set(K::host_headroom, 2'000'000 - rss(rank));
    write_words(row, rank, rank % kStages, one);
    std::ranges::transform(all, one, all.begin(), [](auto a, auto b) { return std::max(a, b); });
    for (auto* slot : {expected.data(), &expected[1 + rank % kStages]}) {
      if (rss(rank) > slot->value) {
        *slot = {rss(rank), rank};
      }
    }
  }
  const auto found = read_words(all);
  for (size_t slot = 0; slot <= kStages; ++slot) {
    EXPECT_EQ(found[slot * kKeys + static_cast<size_t>(K::host_rss)], expected[slot]);
    EXPECT_EQ(found[slot * kKeys + static_cast<size_t>(K::host_headroom)],
              (Found{2'000'000 - expected[slot].value, expected[slot].rank}));
  }
  EXPECT_EQ(peak_rank(found), expected[0].rank);
}

TEST(Layout, MoreKeysThanThereAreKeepTheirPlaces) {
  constexpr uint32_t kRanks = 16'384;
  constexpr uint32_t kStages = 64;
  const std::vector<Key> many(64, kLowest);
  const auto figure = [](uint32_t rank, size_t key) {
    return int64_t{1} << 40 | ((rank * 2'654'435'761 + key * 40'503) % 1'000'003);
  };
  std::vector<int64_t> all(words_of(kStages, many.size()), kNoWord);
  std::vector<int64_t> one(all.size());
  std::vector<int64_t> figures(many.size());
  std::vector<Found> expected(all.size(), {kMostValue, 0});
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto stage = rank % kStages;
    for (size_t key = 0; key < many.size(); ++key) {
      figures[key] = figure(rank, key);
      for (const size_t place : {key, (1 + stage) * many.size() + key}) {
        if (figures[key] < expected[place].value) {
          expected[place] = {figures[key], rank};
        }
      }
    }
    write_words(many, figures, rank, stage, one);
    std::ranges::transform(all, one, all.begin(), [](auto a, auto b) { return std::max(a, b); });
  }
  const auto found = read_words(all, many);
  ASSERT_EQ(found.size(), size_t{65} * 64);
  EXPECT_TRUE(std::ranges::equal(found, expected));
}

TEST(Layout, ThePeakRankIsTheDevicesWhereThereIsOne) {
  const auto peak = [](std::initializer_list<std::pair<K, int64_t>> figures) {
    Row row;
    for (const auto& [key, value] : figures) {
      row.set(key, value);
    }
    std::vector<int64_t> words(words_of(1));
    write_words(row, 4, 0, words);
    Row other;
    other.set(K::host_rss, int64_t{1} << 40);
    std::vector<int64_t> others(words_of(1));
    write_words(other, 2, 0, others);
    std::ranges::transform(words, others, words.begin(),
                           [](auto a, auto b) { return std::max(a, b); });
    return peak_rank(read_words(words));
  };
  EXPECT_EQ(peak({{K::host_rss, 1}}), 2U);
  EXPECT_EQ(peak({{K::device_allocated, 1}}), 4U);
  EXPECT_EQ(peak({{K::device_allocated_peak, 1}}), 4U);
}

// Without a trace of allocations a rank says its peak only while that rises.
TEST(Layout, ALowPeakThatRisesIsNotTheHighest) {
  Row rising;
  rising.set(K::device_allocated, 9);
  rising.set(K::device_allocated_peak, 11);
  Row steady;
  steady.set(K::device_allocated, 70);
  std::vector<int64_t> words(words_of(1));
  std::vector<int64_t> others(words_of(1));
  write_words(rising, 0, 0, words);
  write_words(steady, 3, 0, others);
  std::ranges::transform(words, others, words.begin(),
                         [](auto a, auto b) { return std::max(a, b); });
  EXPECT_EQ(peak_rank(read_words(words)), 3U);
}

// One on a plateau does not say how high it was in this interval, one that rises does.
TEST(Layout, TheHighestPeakIsToldOnlyIfItIsKnown) {
  Row plateau;
  plateau.set(K::host_rss, 600);
  plateau.set(K::host_rss_top, 640);
  plateau.set(K::device_allocated_top, 70);
  Row rising;
  rising.set(K::host_rss_peak, 250);
  rising.set(K::host_rss_top, 250);
  rising.set(K::device_allocated_peak, 11);
  rising.set(K::device_allocated_top, 50);
  std::vector<int64_t> words(words_of(2));
  std::vector<int64_t> others(words_of(2));
  write_words(plateau, 1, 0, words);
  write_words(rising, 2, 1, others);
  std::ranges::transform(words, others, words.begin(),
                         [](auto a, auto b) { return std::max(a, b); });
  const auto peaks = [&](bool exact, K key) {
    auto found = read_words(words);
    drop_unknown_peaks(found, exact);
    std::vector<std::optional<Found>> out;
    for (size_t slot = 0; slot < 3; ++slot) {
      out.push_back(found[slot * kKeys + static_cast<size_t>(key)]);
    }
    return out;
  };
  using Peaks = std::vector<std::optional<Found>>;
  const auto none = std::optional<Found>();
  EXPECT_EQ(peaks(true, K::host_rss_peak), (Peaks{none, none, Found{250, 2}}));
  EXPECT_EQ(peaks(true, K::device_allocated_peak), (Peaks{Found{11, 2}, none, Found{11, 2}}));
  EXPECT_EQ(peaks(false, K::device_allocated_peak), (Peaks{none, none, none}));

  rising.set(K::host_rss_peak, 641);
  rising.set(K::host_rss_top, 641);
  write_words(rising, 2, 1, words);
  std::ranges::transform(words, others, words.begin(),
                         [](auto a, auto b) { return std::max(a, b); });
  EXPECT_EQ(peaks(true, K::host_rss_peak)[0], (Found{641, 2}));
}

}  // namespace
}  // namespace tenure::telemetry
