#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>
#include <tenure/core/scope.h>
#include <tenure/core/storage_ref.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <thread>

namespace tenure {
namespace {

at::Tensor tensor_of(int64_t bytes) { return at::empty({bytes}, at::kByte); }
OwnerId owner(OwnerKind kind = OwnerKind::user) { return intern_owner(kind, "test"); }

TEST(Lease, KeepsTheStorageAliveAndNoMoreThanThat) {
  auto x = tensor_of(100);
  const StorageRef ref(x);
  auto lease = hold(x, owner());
  EXPECT_EQ(x.storage().use_count(), 2);
  x = at::Tensor();
  EXPECT_TRUE(ref.alive());
  EXPECT_EQ(lease.storage().nbytes(), 100);
  EXPECT_TRUE(lease.release());
  EXPECT_FALSE(ref.alive());
}

TEST(Lease, ReleasesItselfAtTheEndOfItsLife) {
  const StorageRef ref = [] {
    auto x = tensor_of(100);
    const auto lease = hold(x, owner());
    return StorageRef(x);
  }();
  EXPECT_FALSE(ref.alive());
  EXPECT_EQ(ledger().totals().all.leases, 0);
}

TEST(Lease, ASecondReleaseDoesNothing) {
  auto lease = hold(tensor_of(100), owner());
  EXPECT_TRUE(lease.release());
  EXPECT_FALSE(lease.release());
  EXPECT_FALSE(Lease().release());
}

TEST(Lease, MovingHandsItOver) {
  auto first = hold(tensor_of(100), owner());
  auto second = std::move(first);
  EXPECT_FALSE(first.held());  // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(second.held());
  EXPECT_EQ(ledger().totals().all.leases, 1);
}

TEST(Lease, MovingOntoAnotherReleasesThatOne) {
  auto x = tensor_of(100);
  const StorageRef ref(x);
  auto lease = hold(x, owner());
  x = at::Tensor();
  lease = hold(tensor_of(50), owner());
  EXPECT_FALSE(ref.alive());
  EXPECT_EQ(ledger().totals().all.bytes, 50);
}

TEST(Lease, MovingOntoItselfKeepsIt) {
  auto lease = hold(tensor_of(100), owner());
  auto& same = lease;
  lease = std::move(same);
  EXPECT_TRUE(lease.held());
}

TEST(Lease, AnotherThreadMayReleaseIt) {
  auto lease = hold(tensor_of(100), owner());
  std::thread([moved = std::move(lease)]() mutable { EXPECT_TRUE(moved.release()); }).join();
  EXPECT_EQ(ledger().totals().all.leases, 0);
}

TEST(Lease, HoldInAClosedScopeGoesToTheProcess) {
  ScopeId closed{};
  {
    const Scope scope("closed");
    closed = scope.id();
  }
  const auto lease = hold(tensor_of(100), owner(), closed);
  EXPECT_EQ(lease.row()->scope, ScopeId::process);
}

TEST(Lease, TransferToAScopeThatIsNotOpenIsRefused) {
  auto lease = hold(tensor_of(100), owner());
  ScopeId closed{};
  {
    const Scope scope("closed");
    closed = scope.id();
  }
  EXPECT_THROW(lease.transfer(closed), ScopeError);
  EXPECT_EQ(lease.row()->scope, ScopeId::process);
}

TEST(Lease, OnceReleasedItSaysSo) {
  auto lease = hold(tensor_of(100), owner());
  lease.release();
  EXPECT_THROW(lease.transfer(ScopeId::process), LeaseError);
  EXPECT_THROW(lease.storage(), LeaseError);
  EXPECT_FALSE(lease.row().has_value());
}

TEST(Lease, RefusedTensorsLeaveTheLedgerAsItWas) {
  const auto beside = hold(tensor_of(100), owner());
  EXPECT_THROW(hold(at::Tensor(), owner()), LeaseError);
  EXPECT_THROW(hold(at::empty({4}, at::kMeta), owner()), LeaseError);
  EXPECT_EQ(ledger().totals().all.leases, 1);
  EXPECT_EQ(ledger().totals().all.bytes, 100);
}

// A slot of the table is used again at once: a stale Lease must not end its successor.
TEST(Lease, AStaleOneDoesNotTouchItsSuccessor) {
  Lease stale;
  {
    Scope scope("step", OnClose::release);
    stale = hold(tensor_of(100), owner());
    scope.close();
  }
  const auto successor = hold(tensor_of(100), owner());
  EXPECT_FALSE(stale.held());
  EXPECT_FALSE(stale.release());
  EXPECT_TRUE(successor.held());
}

TEST(Lease, TheLastTensorMayDieInItsReleaseAndUseTheLedger) {
  std::array<float, 4> memory{};
  bool died = false;
  auto lease = hold(at::from_blob(memory.data(), {4},
                                  [&](void*) {
                                    Scope scope("inside a deleter");
                                    hold(tensor_of(8), owner()).release();
                                    EXPECT_EQ(ledger().totals().all.leases, 0);
                                    died = true;
                                  }),
                    owner());
  lease.release();
  EXPECT_TRUE(died);
}

// Lives until static objects are destroyed, after main().
Lease& static_lease() {
  static Lease lease;
  return lease;
}

TEST(LeaseDeathTest, AStaticOneEndsWithTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        static_lease() = hold(tensor_of(100), owner());
        std::exit(static_lease().held() ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(LeaseDeathTest, OneOfAThreadThatNeverEndsIsLeft) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        std::atomic<bool> held{false};
        std::thread([&] {
          const Scope scope("thread");
          const auto lease = hold(tensor_of(100), owner());
          held = true;
          held.notify_one();
          held.wait(true);
        }).detach();
        held.wait(false);
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
}

// What is leased by the object of a thread_local goes when the thread ends, in its scope or not.
TEST(Lease, AThreadLocalOneEndsWithItsThread) {
  std::thread([] {
    thread_local Lease lease;
    lease = hold(tensor_of(100), owner());
  }).join();
  EXPECT_EQ(ledger().totals().all.leases, 0);
}

}  // namespace
}  // namespace tenure
