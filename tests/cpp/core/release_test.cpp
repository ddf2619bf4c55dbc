#include <tenure/core/release.h>

#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>
#include <tenure/core/scope.h>
#include <tenure/core/storage_ref.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_lazy_clone.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <latch>
#include <thread>
#include <vector>

namespace tenure {
namespace {

const Releaser kTest{.name = "test", .site = "here.cpp:1"};

std::string read_error(const at::Tensor& tensor) {
  try {
    tensor.sum();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(Release, EveryAliasRaisesTheTextUntilItIsRefilled) {
  const auto x = at::arange(16, at::kFloat).view({4, 4});
  const std::vector<at::Tensor> aliases{x,
                                        x.t(),
                                        x.select(0, 2),
                                        x.chunk(2)[1],
                                        x.as_strided({3}, {5}, 1),
                                        x.detach(),
                                        x.variable_data(),
                                        x.view(at::kInt)};
  release_storage(x, kTest);
  for (const auto& alias : aliases) {
    EXPECT_TRUE(read_error(alias).starts_with("UseAfterRelease: storage 0x"));
    EXPECT_THROW(static_cast<void>(alias.const_data_ptr()), c10::Error);
    EXPECT_THROW(static_cast<void>(alias.mutable_data_ptr()), c10::Error);
  }
  refill_storage(x, at::arange(16, at::kFloat));
  for (const auto& alias : aliases) {
    EXPECT_EQ(read_error(alias), "");
  }
  EXPECT_TRUE(at::equal(aliases[1], at::arange(16, at::kFloat).view({4, 4}).t()));
}

TEST(Release, TheTextNamesStorageOwnerReleaserSiteAndScope) {
  const auto x = at::ones({4});
  const auto lease = hold(x, intern_owner(OwnerKind::activation, "mlp", "model.cpp:7"));
  {
    const Scope step("step", 12);
    release_storage(x, {.name = "offload", .site = "train.cpp:41"});
  }
  const auto text = read_error(x);
  EXPECT_TRUE(text.starts_with("UseAfterRelease: " + StorageRef(x).text() +
                               ", owned by activation 'mlp' (model.cpp:7), was released by "
                               "'offload' at train.cpp:41 in scope 'step 12': refill it"))
      << text;
  EXPECT_EQ(released_text(x.storage()), text.substr(0, released_text(x.storage())->size()));
}

TEST(Release, VersionsStay) {
  const auto x = at::ones({4});
  x.add_(1);
  const auto before = x._version();
  release_storage(x, kTest);
  refill_storage(x, at::ones({4}));
  EXPECT_EQ(x._version(), before);
}

TEST(Release, BackwardRaisesAndAfterRefillGivesTheSameGradient) {
  const auto content = at::arange(16, at::kFloat).view({4, 4});
  const auto x = content.clone();
  const auto w = at::ones({4, 4}).requires_grad_();
  auto loss = x.slice(0, 1).t().matmul(w.slice(0, 1)).sum();
  release_storage(x, kTest);
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), c10::Error);
  refill_storage(x, content);
  w.mutable_grad() = at::Tensor();
  loss.backward();

  const auto v = at::ones({4, 4}).requires_grad_();
  content.clone().slice(0, 1).t().matmul(v.slice(0, 1)).sum().backward();
  EXPECT_TRUE(at::equal(w.grad(), v.grad()));
}

TEST(Release, RefusesWhatIsNotItsToFreeAndChangesNothing) {
  std::array<float, 4> memory{1, 2, 3, 4};
  const auto blob = at::from_blob(memory.data(), {4});
  const auto cow = at::ones({4});
  const auto other = at::_lazy_clone(cow);
  const auto fixed = at::ones({4});
  fixed.storage().unsafeGetStorageImpl()->set_resizable(false);
  for (const auto& [tensor, why] :
       {std::pair(blob, "outside PyTorch"), std::pair(cow, "copy-on-write"),
        std::pair(other, "copy-on-write"), std::pair(fixed, "not resizable")}) {
    try {
      release_storage(tensor, kTest);
      ADD_FAILURE() << "released, though " << why;
    } catch (const ReleaseError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
    EXPECT_FALSE(is_released(tensor.storage()));
    EXPECT_EQ(read_error(tensor), "");
  }
}

TEST(Release, WithoutANameIsRefused) {
  const auto x = at::ones({4});
  EXPECT_THROW(release_storage(x, {.name = "", .site = ""}), InputError);
  EXPECT_THROW(release_storage(x, {.name = "a\nb", .site = ""}), InputError);
  EXPECT_EQ(read_error(x), "");
}

TEST(Release, TwiceIsRefused) {
  const auto x = at::ones({4});
  release_storage(x, kTest);
  const auto text = read_error(x);
  EXPECT_THROW(release_storage(x.t(), {.name = "other", .site = ""}), UseAfterRelease);
  EXPECT_EQ(read_error(x), text);
}

TEST(Refill, OfTheWrongSizeIsRefused) {
  const auto x = at::ones({4});
  release_storage(x, kTest);
  EXPECT_THROW(refill_storage(x, at::ones({3})), ReleaseError);
  EXPECT_THROW(refill_storage(x, at::ones({5})), ReleaseError);
  EXPECT_TRUE(is_released(x.storage()));
  refill_storage(x, at::ones({2}, at::kDouble));
  EXPECT_FALSE(is_released(x.storage()));
}

TEST(Refill, OfWhatHasItsDataIsRefused) {
  const auto x = at::ones({4});
  EXPECT_THROW(refill_storage(x), ReleaseError);
  release_storage(x, kTest);
  refill_storage(x, at::ones({4}));
  EXPECT_THROW(refill_storage(x), ReleaseError);
  EXPECT_TRUE(at::equal(x, at::ones({4})));
}

TEST(Release, RequireDataThrowsTheText) {
  const auto x = at::ones({4});
  EXPECT_NO_THROW(require_data(x.storage()));
  release_storage(x, kTest);
  EXPECT_THROW(require_data(x.storage()), UseAfterRelease);
}

// The record of a dead storage must not be taken for that of the next one at its address.
TEST(Release, ANewStorageIsNeverTakenForAReleasedOne) {
  for (int i = 0; i < 10'000; ++i) {
    auto x = at::empty({64});
    EXPECT_FALSE(is_released(x.storage()));
    release_storage(x, kTest);
  }
}

TEST(Release, OfManyThreadsOneReleasesAndOneRefills) {
  constexpr int kThreads = 4;
  for (int round = 0; round < 200; ++round) {
    const auto x = at::ones({16});
    std::atomic<int> released{0};
    std::atomic<int> refilled{0};
    std::latch start(kThreads);
    std::latch all_released(kThreads);
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        start.arrive_and_wait();
        try {
          release_storage(x, kTest);
          ++released;
        } catch (const UseAfterRelease&) {
        }
        all_released.arrive_and_wait();
        try {
          refill_storage(x, at::ones({16}));
          ++refilled;
        } catch (const ReleaseError&) {
        }
      });
    }
    threads.clear();
    EXPECT_EQ(released, 1);
    EXPECT_EQ(refilled, 1);
    EXPECT_TRUE(at::equal(x, at::ones({16})));
  }
}

TEST(Release, TheLedgerCountsNothingMeanwhile) {
  const auto x = at::ones({4});
  const auto lease = hold(x, intern_owner(OwnerKind::user, "test"));
  release_storage(x, kTest);
  EXPECT_EQ(ledger().totals().all.bytes, 0);
  EXPECT_EQ(ledger().totals().all.leases, 1);
  refill_storage(x);
  EXPECT_EQ(ledger().totals().all.bytes, 16);
}

}  // namespace
}  // namespace tenure
