#include <tenure/inspect/kept_heap.h>

#include <tenure/inspect/verdict.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tenure::inspect {
namespace {

constexpr int64_t kMB = 1'000'000;
constexpr int64_t kGiven = 100 * kMB;
constexpr int64_t kBesides = 150 * kMB;

// A process at the end of a step, as malloc and the operating system see it.
struct Moment {
  int64_t given = kGiven;
  int64_t kept = 20 * kMB;
  int64_t own = kGiven + 20 * kMB + kBesides;
};

Verdict verdict_of(const std::function<void(Moment&, int64_t)>& change) {
  KeptHeap heap;
  std::vector<StepRow> rows;
  for (int64_t i = 0; i < 100; ++i) {
    Moment moment;
    change(moment, i);
    StepRow row;
    row.step = static_cast<uint64_t>(i);
    row.seconds = static_cast<double>(i);
    row.rss = moment.own;
    row.heap = moment.given;
    row.heap_free = heap.resident(moment.given, moment.kept, moment.own);
    rows.push_back(row);
  }
  return judge(rows, {}, Unit::step);
}

const char* said(const Verdict& verdict) { return judgement_name(verdict.judgement); }

TEST(KeptHeap, HolesWithoutPagesAreNoGrowth) {
  const auto verdict = verdict_of([](Moment& moment, int64_t i) { moment.kept += i * kMB; });
  EXPECT_STREQ(said(verdict), "flat") << verdict.why;
}

TEST(KeptHeap, HolesWithPagesAreGrowthOfTheAllocator) {
  const auto verdict = verdict_of([](Moment& moment, int64_t i) {
    moment.kept += i * kMB;
    moment.own += i * kMB;
  });
  EXPECT_STREQ(said(verdict), "growth");
  EXPECT_NE(verdict.why.find("it is in allocator, +1.0 MB a step"), std::string::npos)
      << verdict.why;
}

TEST(KeptHeap, OfHolesThatGrowThoseWithPagesCount) {
  const auto verdict = verdict_of([](Moment& moment, int64_t i) {
    moment.kept += 4 * i * kMB;
    moment.own += i * kMB;
  });
  EXPECT_STREQ(said(verdict), "growth");
  EXPECT_NEAR(verdict.per_step, kMB, 0.01 * kMB);
}

TEST(KeptHeap, HolesThatAreGivenBackNowAndThenAreNoGrowth) {
  const auto verdict = verdict_of([](Moment& moment, int64_t i) {
    moment.kept += i * kMB;
    moment.own += i % 10 * kMB;
  });
  EXPECT_STREQ(said(verdict), "flat") << verdict.why;
}

TEST(KeptHeap, WarmUpOfOtherMemoryHidesNoPaper) {
  const auto verdict = verdict_of([](Moment& moment, int64_t i) {
    moment.own += std::min<int64_t>(i, 5) * 20 * kMB;
    moment.kept += i * kMB;
  });
  EXPECT_STREQ(said(verdict), "flat") << verdict.why;
}

TEST(KeptHeap, MemoryThatMallocGivesOutIsNotKept) {
  KeptHeap heap;
  EXPECT_EQ(heap.resident(kGiven, 20 * kMB, 300 * kMB), 20 * kMB);
  EXPECT_EQ(heap.resident(kGiven + 5 * kMB, 15 * kMB, 300 * kMB), 15 * kMB);
  EXPECT_EQ(heap.resident(kGiven + 50 * kMB, 20 * kMB, 350 * kMB), 20 * kMB);
}

TEST(KeptHeap, IsNeverLessThanNothing) {
  KeptHeap heap;
  heap.resident(kGiven, 20 * kMB, 300 * kMB);
  EXPECT_EQ(heap.resident(kGiven, 20 * kMB, 200 * kMB), 0);
}

}  // namespace
}  // namespace tenure::inspect
