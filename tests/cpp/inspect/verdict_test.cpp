#include <tenure/inspect/verdict.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <ranges>
#include <set>
#include <string_view>
#include <vector>

namespace tenure::inspect {
namespace {

using Random = std::mt19937_64;

constexpr int64_t kMB = 1'000'000;
constexpr int64_t kModel = 100 * kMB;
constexpr OriginId kWeights{1};

// What judge() is given, row by row.
struct History {
  std::vector<StepRow> rows;
  Cuts cuts;

  StepRow& add_row() {
    StepRow row;
    row.step = rows.size();
    row.seconds = static_cast<double>(rows.size());
    row.held = kModel;
    row.peak = 3 * kModel;
    row.births = 100;
    row.born_bytes = 200 * kMB;
    row.deaths = 100;
    row.rss = 500 * kMB;
    row.heap = 50 * kMB;
    row.heap_free = 5 * kMB;
    return rows.emplace_back(row);
  }
  void cut(OriginId origin, int64_t bytes, int64_t count, int64_t birth_steps) {
    cuts[origin].push_back({rows.back().step, origin, bytes, count, birth_steps});
  }
  Verdict verdict(Unit unit = Unit::step) const { return judge(rows, cuts, unit); }
};

// `change` gets each row and its number.
template <class Fn>
History history_of(int64_t steps, Fn&& change) {
  History run;
  for (int64_t i = 0; i < steps; ++i) {
    auto& row = run.add_row();
    run.cut(kWeights, kModel, 10, 1);
    change(run, row, i);
  }
  return run;
}

void keep(History& run, OriginId origin, int64_t bytes, int64_t count, int64_t birth_steps) {
  run.cut(origin, bytes, count, birth_steps);
  run.rows.back().held += bytes;
  run.rows.back().peak += bytes;
  run.rows.back().rss += bytes;
}

const Share& share(const Verdict& verdict, std::string_view name) {
  const auto found = std::ranges::find(verdict.shares, name, &Share::name);
  if (found == verdict.shares.end()) {
    ADD_FAILURE() << "no share " << name;
    return verdict.total;
  }
  return *found;
}

std::vector<std::string_view> growing(const Verdict& verdict) {
  std::vector<std::string_view> out;
  for (const auto& part : verdict.shares) {
    if (part.grows) {
      out.emplace_back(part.name);
    }
  }
  return out;
}

const char* said(const Verdict& verdict) { return judgement_name(verdict.judgement); }

TEST(Verdict, JudgementsHaveNames) {
  EXPECT_STREQ(judgement_name(Judgement::flat), "flat");
  EXPECT_STREQ(judgement_name(Judgement::leak), "leak");
  EXPECT_STREQ(judgement_name(Judgement::growth), "growth");
  EXPECT_STREQ(judgement_name(Judgement::too_short), "too-short");
}

TEST(Verdict, ASteadyRunIsFlat) {
  const auto verdict = history_of(60, [](History&, StepRow&, int64_t) {}).verdict();
  EXPECT_STREQ(said(verdict), "flat");
  EXPECT_EQ(verdict.why, "no part of the memory grows for good");
  EXPECT_EQ(verdict.steps, 60);
  EXPECT_DOUBLE_EQ(verdict.seconds_per_step, 1);
  EXPECT_FALSE(verdict.total.grows);
  EXPECT_TRUE(verdict.suspects.empty());
}

TEST(Verdict, StoragesOfEverMoreStepsAreALeakWithTheirOrigin) {
  const auto verdict = history_of(60, [](History& run, StepRow&, int64_t i) {
                         keep(run, OriginId{7}, (i + 1) * kMB, i + 1, i + 1);
                       }).verdict();
  EXPECT_STREQ(said(verdict), "leak");
  ASSERT_EQ(verdict.suspects.size(), 1);
  const auto& suspect = verdict.suspects[0];
  EXPECT_EQ(suspect.origin, OriginId{7});
  EXPECT_NEAR(suspect.per_step, kMB, 0.01 * kMB);
  EXPECT_GT(suspect.confidence, 0.99);
  EXPECT_EQ(suspect.bytes, 60 * kMB);
  EXPECT_EQ(suspect.count, 60);
  EXPECT_LE(suspect.since, 5);
  EXPECT_FALSE(suspect.one);
  EXPECT_NEAR(verdict.per_step, kMB, 0.01 * kMB);
  EXPECT_EQ(verdict.confidence, suspect.confidence);
  EXPECT_TRUE(share(verdict, "held").grows);
  EXPECT_EQ(verdict.why, "storages made in ever more steps stay alive: +1.0 MB a step");
}

TEST(Verdict, StepsAfterTheLastCutAreNoLevel) {
  auto history = history_of(60, [](History& run, StepRow&, int64_t i) {
    keep(run, OriginId{7}, (i + 1) * kMB, i + 1, i + 1);
  });
  const std::set<uint64_t> taken{10, 12, 14, 16, 19, 22, 26, 31, 37, 44};
  for (auto& [origin, series] : history.cuts) {
    std::erase_if(series, [&](const Cut& cut) { return !taken.contains(cut.step); });
  }
  EXPECT_STREQ(said(history.verdict()), "leak");
}

TEST(Verdict, ALeakBeginsWhereItBegan) {
  const auto verdict = history_of(120, [](History& run, StepRow&, int64_t i) {
                         if (i >= 60) {
                           keep(run, OriginId{7}, (i - 59) * kMB, i - 59, i - 59);
                         }
                       }).verdict();
  EXPECT_STREQ(said(verdict), "leak");
  EXPECT_NEAR(static_cast<double>(verdict.since), 60, 6);
}

TEST(Verdict, SuspectsComeFastestFirstWithoutTheSmall) {
  const auto verdict = history_of(60, [](History& run, StepRow&, int64_t i) {
                         keep(run, OriginId{5}, i * kMB / 200, i, i);
                         keep(run, OriginId{6}, i * kMB, i, i);
                         keep(run, OriginId{7}, i * 3 * kMB, i, i);
                       }).verdict();
  ASSERT_EQ(verdict.suspects.size(), 2);
  EXPECT_EQ(verdict.suspects[0].origin, OriginId{7});
  EXPECT_EQ(verdict.suspects[1].origin, OriginId{6});
  EXPECT_NEAR(verdict.per_step, 4 * kMB, 0.05 * kMB);
}

// A shuffled queue whose storages come from one loader and then ever more from another.
TEST(Verdict, StoragesThatReplaceAnothersAreFlat) {
  const auto verdict = history_of(100, [](History& run, StepRow&, int64_t i) {
                         keep(run, OriginId{5}, (100 - i) * kMB, 100 - i, 100 - i);
                         keep(run, OriginId{6}, i * kMB, i, i);
                       }).verdict();
  EXPECT_STREQ(said(verdict), "flat");
}

TEST(Verdict, OriginsThatLeakByTurnsAreALeakTogether) {
  std::vector<int64_t> held(3);
  const auto verdict =
      history_of(120, [&](History& run, StepRow&, int64_t i) {
        ++held[static_cast<size_t>(i / 10 % 3)];
        for (size_t k = 0; k < held.size(); ++k) {
          keep(run, OriginId{5 + static_cast<uint32_t>(k)}, held[k] * kMB, held[k], held[k]);
        }
      }).verdict();
  EXPECT_STREQ(said(verdict), "leak");
  for (const auto& suspect : verdict.suspects) {
    EXPECT_NE(suspect.origin, kWeights);
  }
}

TEST(Verdict, LongerSequencesAreGrowthAndNoLeak) {
  const auto verdict = history_of(60, [](History& run, StepRow& row, int64_t i) {
                         keep(run, OriginId{7}, i * kMB, 4, 1);
                         row.born_bytes += static_cast<uint64_t>(20 * i * kMB);
                         row.peak += 5 * i * kMB;
                       }).verdict();
  EXPECT_STREQ(said(verdict), "growth");
  EXPECT_TRUE(verdict.suspects.empty());
  EXPECT_TRUE(verdict.peak.grows);
  EXPECT_NE(verdict.why.find("larger inputs"), std::string::npos) << verdict.why;
}

TEST(Verdict, WhatTheAllocatorKeepsForLongerSequencesIsTheirs) {
  const auto verdict = history_of(60, [](History&, StepRow& row, int64_t i) {
                         row.born_bytes += static_cast<uint64_t>(20 * i * kMB);
                         row.peak += 5 * i * kMB;
                         *row.heap_free += 6 * i * kMB;
                         row.rss += 6 * i * kMB;
                       }).verdict();
  EXPECT_STREQ(said(verdict), "growth");
  EXPECT_NEAR(share(verdict, "larger inputs").per_step, 5 * kMB, 0.1 * kMB);
  EXPECT_NEAR(share(verdict, "allocator").per_step, kMB, 0.1 * kMB);
  EXPECT_NEAR(share(verdict, "unexplained").per_step, 0, 0.1 * kMB);
}

TEST(Verdict, FilesInMemoryAreGrowth) {
  const auto verdict =
      history_of(60, [](History&, StepRow& row, int64_t i) { row.in_memory = i * kMB; }).verdict();
  EXPECT_STREQ(said(verdict), "growth");
  EXPECT_EQ(growing(verdict), std::vector<std::string_view>{"files in memory"});
  EXPECT_NEAR(verdict.total.per_step, kMB, 0.1 * kMB);
}

Evidence bounded(OriginId origin) {
  Evidence out;
  out.bounded.insert(origin);
  return out;
}

TEST(Verdict, WhatIsKnownToHaveABoundIsGrowthAndNoLeak) {
  const auto run = history_of(60, [](History& all, StepRow&, int64_t i) {
    keep(all, OriginId{7}, (i + 1) * kMB, i + 1, i + 1);
  });
  const auto verdict = judge(run.rows, run.cuts, Unit::step, bounded(OriginId{7}));
  EXPECT_STREQ(said(verdict), "growth");
  EXPECT_TRUE(verdict.suspects.empty());
  ASSERT_EQ(verdict.filling.size(), 1);
  EXPECT_EQ(verdict.why, "something that has a bound fills, by +1.0 MB a step until it is full");
}

TEST(Verdict, ALeakBesideSomethingThatFillsIsALeak) {
  const auto run = history_of(60, [](History& all, StepRow&, int64_t i) {
    keep(all, OriginId{7}, (i + 1) * kMB, i + 1, i + 1);
    keep(all, OriginId{8}, (i + 1) * kMB, i + 1, i + 1);
  });
  const auto verdict = judge(run.rows, run.cuts, Unit::step, bounded(OriginId{7}));
  EXPECT_STREQ(said(verdict), "leak");
  ASSERT_EQ(verdict.suspects.size(), 1);
  EXPECT_EQ(verdict.suspects[0].origin, OriginId{8});
}

// One scalar a step: a list of losses.
History of_scalars() {
  return history_of(60, [](History& all, StepRow&, int64_t i) {
    keep(all, OriginId{7}, 4 * (i + 1), i + 1, i + 1);
  });
}

TEST(Verdict, GraphsThatAreKeptAreALeakOfWhatHeadsThem) {
  const auto run = of_scalars();
  EXPECT_STREQ(said(run.verdict()), "flat");
  Evidence evidence;
  evidence.graphs[OriginId{7}] = {.per_step = 40e3, .bytes = 2'400'000, .since = 3};
  const auto verdict = judge(run.rows, run.cuts, Unit::step, evidence);
  EXPECT_STREQ(said(verdict), "leak");
  ASSERT_EQ(verdict.suspects.size(), 1);
  EXPECT_EQ(verdict.suspects[0].count, 60);
  EXPECT_EQ(verdict.suspects[0].bytes, 2'400'000);
  EXPECT_EQ(verdict.since, 3);
  EXPECT_EQ(verdict.why, "storages made in ever more steps stay alive: +40.0 kB a step");
}

TEST(Verdict, AFewNodesAStepAreNotSpokenOf) {
  const auto run = of_scalars();
  Evidence evidence;
  evidence.graphs[OriginId{7}] = {.per_step = 700, .bytes = 42'000, .since = 3};
  EXPECT_STREQ(said(judge(run.rows, run.cuts, Unit::step, evidence)), "flat");
}

TEST(Verdict, AQueueOfLongerSequencesIsGrowthAndNoLeak) {
  const auto verdict = history_of(100, [](History& run, StepRow& row, int64_t i) {
                         const auto queued = std::min<int64_t>(i + 1, 8);
                         keep(run, OriginId{7}, queued * i * kMB, queued, queued);
                         row.born_bytes += static_cast<uint64_t>(20 * i * kMB);
                       }).verdict();
  EXPECT_STREQ(said(verdict), "growth");
}

TEST(Verdict, ACacheThatIsFullIsNotAccusedOfWhatOthersGrow) {
  const auto verdict = history_of(100, [](History& run, StepRow& row, int64_t i) {
                         const auto cached = std::min<int64_t>(i / 2, 12);
                         keep(run, OriginId{6}, cached * 4 * kMB, cached, cached);
                         keep(run, OriginId{7}, i * kMB, 4, 1);
                         row.born_bytes += static_cast<uint64_t>(20 * i * kMB);
                       }).verdict();
  EXPECT_STREQ(said(verdict), "growth");
}

TEST(Verdict, OneStorageMadeLongerInEachStepIsALeak) {
  const auto verdict = history_of(60, [](History& run, StepRow& row, int64_t i) {
                         keep(run, OriginId{7}, i * kMB, 1, 1);
                         row.born_bytes += static_cast<uint64_t>(i * kMB);
                       }).verdict();
  EXPECT_STREQ(said(verdict), "leak");
  ASSERT_EQ(verdict.suspects.size(), 1);
  EXPECT_EQ(verdict.suspects[0].origin, OriginId{7});
  EXPECT_TRUE(verdict.suspects[0].one);
  EXPECT_NEAR(verdict.suspects[0].per_step, kMB, 0.01 * kMB);
}

TEST(Verdict, AGrowingHeapIsGrowthOfTheHeap) {
  const auto verdict = history_of(60, [](History&, StepRow& row, int64_t i) {
                         *row.heap += i * kMB;
                         row.rss += i * kMB;
                       }).verdict();
  EXPECT_STREQ(said(verdict), "growth");
  EXPECT_EQ(growing(verdict), std::vector<std::string_view>{"other host heap"});
  EXPECT_NEAR(verdict.per_step, kMB, 0.01 * kMB);
  EXPECT_EQ(
      verdict.why,
      "it is in other host heap, +1.0 MB a step, and no storage that is known to last explains "
      "it");
}

TEST(Verdict, GrowingChildrenAreGrowthOfTheChildren) {
  const auto verdict = history_of(60, [](History&, StepRow& row, int64_t i) {
                         row.children = 200 * kMB + i * kMB;
                       }).verdict();
  EXPECT_STREQ(said(verdict), "growth");
  EXPECT_EQ(growing(verdict), std::vector<std::string_view>{"child processes"});
  EXPECT_TRUE(verdict.total.grows);
}

TEST(Verdict, AGrowingReserveIsGrowthOfTheAllocator) {
  const auto verdict = history_of(60, [](History&, StepRow& row, int64_t i) {
                         row.device_allocated = 300 * kMB;
                         row.device_reserved = 400 * kMB + 2 * i * kMB;
                         row.device_used = 500 * kMB + 2 * i * kMB;
                       }).verdict();
  EXPECT_STREQ(said(verdict), "growth");
  EXPECT_EQ(growing(verdict), std::vector<std::string_view>{"allocator"});
  EXPECT_NEAR(share(verdict, "allocator").per_step, 2 * kMB, 0.02 * kMB);
  EXPECT_NEAR(share(verdict, "device memory outside torch").per_step, 0, 1);
}

TEST(Verdict, OtherDeviceMemoryIsNotTheAllocators) {
  const auto verdict = history_of(60, [](History&, StepRow& row, int64_t i) {
                         row.device_allocated = 300 * kMB;
                         row.device_reserved = 400 * kMB;
                         row.device_used = 500 * kMB + i * kMB;
                       }).verdict();
  EXPECT_STREQ(said(verdict), "growth");
  EXPECT_EQ(growing(verdict), std::vector<std::string_view>{"device memory outside torch"});
}

TEST(Verdict, GrowthThatNobodyCountsIsGrowthOfTheProcess) {
  const auto verdict =
      history_of(60, [](History&, StepRow& row, int64_t i) { row.rss += i * kMB; }).verdict();
  EXPECT_STREQ(said(verdict), "growth");
  EXPECT_TRUE(growing(verdict).empty());
  EXPECT_NEAR(share(verdict, "unexplained").per_step, kMB, 0.01 * kMB);
}

TEST(Verdict, AWarmUpThatEndsIsFlat) {
  const auto verdict = history_of(150, [](History&, StepRow& row, int64_t i) {
                         const auto warm = 1 - std::exp(-static_cast<double>(i) / 10);
                         row.rss += static_cast<int64_t>(300e6 * warm);
                         *row.heap_free += static_cast<int64_t>(100e6 * warm);
                       }).verdict();
  EXPECT_STREQ(said(verdict), "flat");
}

TEST(Verdict, StateThatTheFirstStepsMakeIsFlat) {
  const auto verdict = history_of(40, [](History& run, StepRow&, int64_t i) {
                         keep(run, OriginId{7}, i < 2 ? 0 : 2 * kModel, 20, 1);
                       }).verdict();
  EXPECT_STREQ(said(verdict), "flat");
}

TEST(Verdict, FewStepsAreTooShortHoweverMuchTheyGrow) {
  const auto leak = [](History& run, StepRow&, int64_t i) {
    keep(run, OriginId{7}, (i + 1) * kMB, i + 1, i + 1);
  };
  const auto verdict = history_of(13, leak).verdict();
  EXPECT_STREQ(said(verdict), "too-short");
  EXPECT_EQ(verdict.steps, 13);
  EXPECT_EQ(verdict.why, "at least 14 are needed to tell growth from warm-up");
  EXPECT_STREQ(said(history_of(14, leak).verdict()), "leak");
  EXPECT_STREQ(said(History().verdict()), "too-short");
}

TEST(Verdict, SharesAddUpToTheTotal) {
  Random random(1);
  std::normal_distribution<double> noise(0, 1e5);
  const auto verdict = history_of(80, [&](History& run, StepRow& row, int64_t i) {
                         const auto some = [&] { return static_cast<int64_t>(noise(random)); };
                         keep(run, OriginId{7}, i * kMB, i, i);
                         *row.heap += i * kMB / 2 + some();
                         row.rss += i * 2 * kMB + some();
                         row.children = 100 * kMB + i * kMB / 4 + some();
                         row.shared = 10 * kMB + some();
                         row.pinned = 10 * kMB;
                         row.device_used = 400 * kMB + i * kMB + some();
                         row.device_reserved = 300 * kMB + i * kMB;
                         row.device_allocated = 200 * kMB;
                       }).verdict();
  double sum = 0;
  for (const auto& part : verdict.shares) {
    sum += part.per_step;
  }
  EXPECT_NEAR(sum, verdict.total.per_step, 1);
  EXPECT_NEAR(verdict.total.per_step, 4.25 * kMB, 0.1 * kMB);
  EXPECT_NEAR(share(verdict, "held").per_step, kMB, 0.05 * kMB);
  EXPECT_NEAR(share(verdict, "other host heap").per_step, kMB / 2.0, 0.05 * kMB);
  EXPECT_STREQ(verdict.shares.back().name, "unexplained");
  EXPECT_NEAR(verdict.shares.back().per_step, 1.5 * kMB, 0.1 * kMB);
}

TEST(Verdict, IntervalsOfTheFirstHalfMinuteAreNoGrowth) {
  const auto loads = [](double seconds) {
    return history_of(60, [&](History&, StepRow& row, int64_t i) {
      row.seconds = seconds * static_cast<double>(i) / 59;
      *row.heap += 5 * i * kMB;
      row.rss += 5 * i * kMB;
    });
  };
  EXPECT_STREQ(said(loads(29).verdict(Unit::interval)), "too-short");
  EXPECT_STREQ(said(loads(31).verdict(Unit::interval)), "growth");
  EXPECT_STREQ(said(loads(29).verdict(Unit::step)), "growth");
}

TEST(Verdict, TheEndOfAProgramIsNoIntervalOfIt) {
  const auto ends = [](int64_t part) {  // of what leaked, in tenths, that is freed by the last row
    return history_of(60, [&](History& run, StepRow&, int64_t i) {
      const auto kept = i < 59 ? i + 1 : (i + 1) * (10 - part) / 10;
      keep(run, OriginId{7}, kept * kMB, kept, kept);
    });
  };
  for (const int64_t part : {1, 3, 5, 8, 10}) {
    EXPECT_STREQ(said(ends(part).verdict(Unit::interval)), "leak") << part;
  }
}

TEST(Verdict, RowsThatStandForSeveralStepsGiveThePaceOfOne) {
  auto run = history_of(200, [](History& r, StepRow&, int64_t i) {
    keep(r, OriginId{7}, (i + 1) * kMB, i + 1, i + 1);
  });
  std::erase_if(run.rows, [](const StepRow& row) { return row.step % 4 != 0; });
  const auto verdict = run.verdict();
  EXPECT_STREQ(said(verdict), "leak");
  EXPECT_NEAR(verdict.per_step, kMB, 0.05 * kMB);
  EXPECT_NEAR(verdict.total.per_step, kMB, 0.05 * kMB);
  EXPECT_NEAR(verdict.seconds_per_step, 1, 0.01);
}

TEST(Verdict, ThinnedRowsGiveThePaceOfAll) {
  auto run = history_of(8000, [](History&, StepRow& row, int64_t i) {
    row.held += 65'536 * i;
    row.rss += 65'536 * i;
  });
  run.cuts.clear();
  while (run.rows.size() > 1500) {  // as a recording at its cap does
    std::vector<StepRow> kept;
    for (size_t i = 0; i < run.rows.size(); ++i) {
      if (i % 2 == 0 || i > run.rows.size() / 2) {
        kept.push_back(run.rows[i]);
      }
    }
    run.rows = kept;
  }
  const auto verdict = run.verdict();
  EXPECT_EQ(verdict.judgement, Judgement::growth);
  EXPECT_NEAR(verdict.per_step, 65'536, 700);
  EXPECT_LT(verdict.since, 300);
}

TEST(Verdict, CutsNowAndThenAreEnough) {
  auto run = history_of(200, [](History& r, StepRow&, int64_t i) {
    keep(r, OriginId{7}, (i + 1) * kMB, i + 1, i + 1);
  });
  for (auto& [origin, cuts] : run.cuts) {
    std::erase_if(cuts, [](const Cut& cut) { return cut.step % 16 != 3; });
  }
  const auto verdict = run.verdict();
  EXPECT_STREQ(said(verdict), "leak");
  EXPECT_NEAR(verdict.per_step, kMB, 0.05 * kMB);
}

// A training loop, storage by storage.
class Loop {
 public:
  static constexpr OriginId kLeak{9};

  // `leak`: bytes kept for ever every few steps.
  explicit Loop(uint64_t seed, int64_t leak = 0) : random_(seed), leak_(leak) { choose(); }

  History run() {
    const int64_t steps = pick(60, 250);
    put(kWeights, kModel);
    for (step_ = 0; step_ < steps; ++step_) {
      peak_ = born_ = births_ = deaths_ = 0;
      train();
      evaluate();
      save();
      end_step();
    }
    return std::move(run_);
  }

 private:
  struct Stored {
    OriginId origin{};
    int64_t bytes = 0;
    int64_t step = 0;
  };
  static constexpr OriginId kState{2}, kLoss{3}, kQueue{4}, kMetrics{5}, kMasks{6}, kOutputs{7},
      kActivations{8};

  void choose() {
    evaluates_ = pick(8, 40);
    saves_ = pick(10, 60);
    epoch_ = pick(10, 30);
    queue_ = pick(1, 8);
    lengths_ = pick(4, 12);
    growing_ = pick(0, 3) == 0 ? 8 : 0;
    leaks_ = pick(1, 3);
  }
  int64_t pick(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  void put(OriginId origin, int64_t bytes) {
    stored_.push_back({origin, bytes, step_});
    held_ += bytes;
    peak_ = std::max(peak_, held_);
    born_ += bytes;
    ++births_;
  }
  void drop(OriginId origin, size_t left = 0) {
    auto all = static_cast<size_t>(std::ranges::count(stored_, origin, &Stored::origin));
    std::erase_if(stored_, [&](const Stored& stored) {
      const bool gone = stored.origin == origin && all > left;
      if (gone) {
        --all;
        held_ -= stored.bytes;
        ++deaths_;
      }
      return gone;
    });
  }

  void train() {
    if (step_ == 0) {
      put(kState, 2 * kModel);
    }
    const int64_t length = pick(16, 512) + growing_ * step_;
    put(kQueue, length * 4096);
    drop(kQueue, static_cast<size_t>(queue_));
    for (int layer = 0; layer < 6; ++layer) {
      put(kActivations, length * 65536);
    }
    drop(kActivations);
    drop(kLoss);
    put(kLoss, 512);
    drop(kOutputs);
    put(kOutputs, length * 16384);
    if (step_ % epoch_ == 0) {
      drop(kMetrics);
    }
    put(kMetrics, 1 << 18);
    if (known_.insert(pick(1, lengths_)).second) {
      put(kMasks, 4 * kMB);
    }
    if (leak_ > 0 && step_ % leaks_ == 0) {
      put(kLeak, leak_);
    }
  }
  void evaluate() {
    if (step_ % evaluates_ != evaluates_ - 1) {
      return;
    }
    for (int batch = 0; batch < 5; ++batch) {
      put(kOutputs, pick(1, 40) * kMB);
    }
    drop(kOutputs);
  }
  void save() {
    if (step_ % saves_ == saves_ - 1) {
      spike_ = 2 * kModel;
    }
  }
  void end_step() {
    auto& row = run_.add_row();
    std::map<OriginId, std::vector<Stored>> by_origin;
    for (const auto& [origin, series] : run_.cuts) {
      by_origin[origin];
    }
    for (const auto& stored : stored_) {
      by_origin[stored.origin].push_back(stored);
    }
    for (const auto& [origin, all] : by_origin) {
      std::set<int64_t> steps;
      int64_t bytes = 0;
      for (const auto& stored : all) {
        steps.insert(stored.step);
        bytes += stored.bytes;
      }
      run_.cut(origin, bytes, std::ssize(all), std::ssize(steps));
    }
    most_ = std::max(most_, peak_);
    row.held = held_;
    row.peak = peak_;
    row.births = static_cast<uint64_t>(births_);
    row.born_bytes = static_cast<uint64_t>(born_);
    row.deaths = static_cast<uint64_t>(deaths_);
    *row.heap += pick(0, kMB) + spike_;
    *row.heap_free = most_ - held_;
    row.rss += most_ + spike_ + pick(0, kMB);
    spike_ = 0;
  }

  Random random_;
  History run_;
  std::vector<Stored> stored_;
  std::set<int64_t> known_;
  int64_t evaluates_, saves_, epoch_, queue_, lengths_, growing_, leaks_, leak_;
  int64_t step_ = 0, held_ = 0, peak_ = 0, most_ = 0, born_ = 0, births_ = 0, deaths_ = 0,
          spike_ = 0;
};

TEST(Verdict, OfFiveHundredHealthyLoopsNoneLeaks) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    const auto verdict = Loop(seed).run().verdict();
    EXPECT_STRNE(said(verdict), "leak")
        << "seed " << seed << ", " << verdict.steps << " steps, origin "
        << static_cast<uint32_t>(verdict.suspects[0].origin);
    EXPECT_STRNE(said(verdict), "too-short") << "seed " << seed;
  }
}

// A cache of so many masks of all lengths, the one unused for longest making room.
History cache_of_masks(uint64_t seed, int64_t steps, size_t most, int64_t longest) {
  Random random(seed);
  std::uniform_int_distribution<int64_t> length(longest / 8, longest);
  struct Mask {
    int64_t length, born;
  };
  std::vector<Mask> masks;
  return history_of(steps, [&](History& run, StepRow&, int64_t i) {
    Mask mask{length(random), i};
    if (const auto found = std::ranges::find(masks, mask.length, &Mask::length);
        found != masks.end()) {
      mask = *found;
      masks.erase(found);
    }
    masks.push_back(mask);
    if (masks.size() > most) {
      masks.erase(masks.begin());
    }
    int64_t bytes = 0;
    std::set<int64_t> births;
    for (const auto& kept : masks) {
      bytes += 4 * kept.length * kept.length;
      births.insert(kept.born);
    }
    keep(run, OriginId{7}, bytes, std::ssize(masks), std::ssize(births));
  });
}

// See Note [Sizes that vary].
TEST(Verdict, ACacheThatIsFullIsFlatThoughItsSizesVary) {
  size_t accused = 0;
  size_t growing = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    for (const size_t most : {8, 16, 32}) {
      const auto verdict = cache_of_masks(seed, 80, most, 400).verdict();
      accused += verdict.judgement == Judgement::leak ? 1 : 0;
      growing += verdict.judgement == Judgement::growth ? 1 : 0;
    }
  }
  EXPECT_EQ(accused, 0);
  EXPECT_LE(growing, 6);  // of 600
}

TEST(Verdict, AFullCacheOfThingsThatBecomeLargerIsGrowth) {
  std::vector<int64_t> lengths;
  const auto verdict =
      history_of(80, [&](History& run, StepRow&, int64_t i) {
        lengths.push_back(100 + i + i % 7);
        int64_t bytes = 0;
        for (const auto length : lengths | std::views::reverse | std::views::take(16)) {
          bytes += 4 * length * length;
        }
        const auto alive = std::min<int64_t>(i + 1, 16);
        keep(run, OriginId{7}, bytes, alive, alive);
      }).verdict();
  EXPECT_EQ(verdict.judgement, Judgement::growth);
}

TEST(Verdict, OfTwoHundredLoopsThatLeakNearlyAllAreFoundWithTheirOrigin) {
  size_t found = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto verdict = Loop(seed, 2 * kMB).run().verdict();
    found += static_cast<size_t>(verdict.judgement == Judgement::leak &&
                                 verdict.suspects[0].origin == Loop::kLeak);
  }
  EXPECT_GE(found, 190);
}

}  // namespace
}  // namespace tenure::inspect
