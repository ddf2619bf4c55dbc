#include <tenure/store/store.h>

#include <tenure/core/part.h>
#include <tenure/core/text.h>
#include <tenure/store/errors.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <unistd.h>

namespace tenure::store {
namespace {

const ScopeName kStep{.kind = "step", .id = "1"};

StoreOptions options(const std::string& role) {
  StoreOptions out;
  out.job = text("store-test-", ::getpid());
  out.role = role;
  return out;
}

class StoreTest : public ::testing::Test {
 protected:
  Store rollout_{options("rollout")};
  Store trainer_{options("trainer")};
};

TEST_F(StoreTest, AnotherStoreFetches) {
  const auto tensor = at::arange(100'000);
  const auto handle = rollout_.put(kStep, tensor);
  EXPECT_TRUE(at::equal(trainer_.get(handle), tensor));
  GetOptions rows;
  rows.rows = {.first = 10, .count = 5};
  EXPECT_TRUE(at::equal(trainer_.get(handle, rows), tensor.slice(0, 10, 15)));
}

TEST_F(StoreTest, ManyAreOneFetch) {
  std::vector<Handle> handles;
  handles.reserve(100);
  for (int64_t i = 0; i < 100; ++i) {
    handles.push_back(rollout_.put(kStep, at::arange(i)));
  }
  const auto tensors = trainer_.get_all(handles);
  for (int64_t i = 0; i < 100; ++i) {
    EXPECT_TRUE(at::equal(tensors[static_cast<size_t>(i)], at::arange(i)));
  }
}

TEST_F(StoreTest, AClosedScopeIsGoneEverywhere) {
  GetOptions keep;
  keep.keep = true;
  const auto handle = rollout_.put(kStep, at::ones({100'000}));
  (void)trainer_.get(handle, keep);
  EXPECT_EQ(trainer_.stats().kept_bytes, 400'000U);
  trainer_.adopt(kStep, {&handle, 1});
  const auto closing = trainer_.close(kStep);
  ASSERT_EQ(closing.elsewhere.size(), 1U);
  EXPECT_EQ(closing.elsewhere[0].second.freed, 1U);
  EXPECT_EQ(trainer_.stats().kept_bytes, 0U);
  EXPECT_EQ(rollout_.stats().objects.objects, 0U);
  EXPECT_THROW((void)trainer_.get(handle), StaleHandle);
  EXPECT_FALSE(rollout_.put(kStep, at::ones({3})).stored());
}

TEST_F(StoreTest, AHalfWayFetchTargetMustFit) {
  const auto handle = rollout_.put(kStep, at::ones({4}));
  GetOptions into;
  into.into = {at::zeros({5})};
  EXPECT_THROW((void)trainer_.get(handle, into), InputError);
  into.into = {at::zeros({4})};
  EXPECT_TRUE(at::equal(trainer_.get(handle, into), at::ones({4})));
}

TEST_F(StoreTest, ATensorWithoutBytesIsRefused) {
  EXPECT_THROW((void)rollout_.put(kStep, at::Tensor()), InputError);
  const auto meta = at::empty({3}, at::TensorOptions().device(at::kMeta));
  EXPECT_THROW((void)rollout_.put(kStep, meta), InputError);
}

TEST_F(StoreTest, AHandleOfAnotherJobIsRefused) {
  auto other = options("rollout");
  other.job += "-other";
  Store stranger(other);
  const auto handle = stranger.put(kStep, at::ones({3}));
  EXPECT_THROW((void)trainer_.get(handle), AccessRefused);
}

TEST_F(StoreTest, OthersSeeItsFigures) {
  (void)rollout_.put(kStep, at::ones({100'000}));
  const auto part = part_named("store");
  ASSERT_NE(part, nullptr);
  const auto figures = part->stats();
  EXPECT_EQ(figures.front().first, "stored_bytes");
  EXPECT_GE(figures.front().second, 400'000);
}

}  // namespace
}  // namespace tenure::store
