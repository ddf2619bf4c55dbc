#include <tenure/train/spare_heap.h>

#include <tenure/core/sample.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace tenure::train {
namespace {

constexpr int64_t kMB = 1'000'000;

int64_t resident_bytes() { return Sampler::shared().sample().process.rss; }

std::unique_ptr<char[]> written(size_t bytes) {
  auto out = std::make_unique_for_overwrite<char[]>(bytes);
  std::memset(out.get(), 1, bytes);
  return out;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsGlibcs = false;
#else
constexpr bool kIsGlibcs = true;
#endif

TEST(SpareHeap, HolesGoBackToTheOperatingSystem) {
  if (!kIsGlibcs) {
    GTEST_SKIP() << "a sanitizer's malloc keeps what is freed";
  }
  std::vector<std::unique_ptr<char[]>> stay;
  std::vector<std::unique_ptr<char[]>> go;
  for (int i = 0; i < 1000; ++i) {
    go.push_back(written(100'000));
    stay.push_back(written(100));
  }
  go.clear();
  const auto before = resident_bytes();
  EXPECT_TRUE(SpareHeap().step_ended(before));
  EXPECT_LT(resident_bytes(), before - 90 * kMB);
}

TEST(SpareHeap, ALevelProcessIsLeftAlone) {
  SpareHeap heap;
  EXPECT_TRUE(heap.step_ended(300 * kMB));
  for (int step = 0; step < 100; ++step) {
    EXPECT_FALSE(heap.step_ended((300 + step % 8) * kMB)) << step;
  }
}

TEST(SpareHeap, AProcessThatHasGrownByAPartIsNot) {
  SpareHeap heap;
  heap.step_ended(300 * kMB);
  EXPECT_FALSE(heap.step_ended(320 * kMB));  // what a step needs again is no growth
  EXPECT_FALSE(heap.step_ended(330 * kMB));
  EXPECT_TRUE(heap.step_ended(331 * kMB));
}

TEST(SpareHeap, GrowthThatStaysIsTriedOnce) {
  SpareHeap heap;
  heap.step_ended(300 * kMB);
  heap.step_ended(300 * kMB);
  EXPECT_TRUE(heap.step_ended(400 * kMB));
  for (int step = 0; step < 100; ++step) {
    EXPECT_FALSE(heap.step_ended(400 * kMB)) << step;
  }
}

}  // namespace
}  // namespace tenure::train
