// What a fence is on the CPU, and what the ledger does with one; fences of a device are tested in
// tests/cpp/core_device.
#include <tenure/core/fence.h>

#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>
#include <tenure/core/release.h>
#include <tenure/core/storage_ref.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

namespace tenure {
namespace {

OwnerId owner() { return intern_owner(OwnerKind::user, "test"); }
at::Tensor tensor_of(int64_t bytes) { return at::empty({bytes}, at::kByte); }

class Gate final : public Fence::Point {
 public:
  bool ready() const override { return open; }
  void wait_on_host() const override { open = true; }
  void wait_on(const c10::Stream& /*stream*/) const override {}
  mutable std::atomic<bool> open{false};
};

TEST(Fence, IsReadyAtOnceOnTheCpu) {
  const auto fence = Fence::record(c10::Device(c10::kCPU));
  EXPECT_TRUE(fence.ready());
  fence.wait();
  fence.wait(c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU)));
  EXPECT_TRUE(Fence().ready());
  EXPECT_TRUE(Fence::record(c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU))).ready());
}

TEST(Fence, CopiesShareThePoint) {
  const auto gate = std::make_shared<Gate>();
  const Fence fence(gate);
  const auto copy = fence;
  EXPECT_FALSE(copy.ready());
  fence.wait();
  EXPECT_TRUE(copy.ready());
}

TEST(Fence, AReadyOneEndsTheLeaseAtOnce) {
  auto x = tensor_of(100);
  const StorageRef ref(x);
  auto lease = hold(x, owner());
  x = at::Tensor();
  lease.release(Fence());
  EXPECT_FALSE(ref.alive());
}

TEST(Fence, KeepsTheMemoryOfAReleasedStorage) {
  const auto gate = std::make_shared<Gate>();
  const auto x = tensor_of(100);
  release_storage(x, {.name = "test", .site = ""}, Fence(gate));
  EXPECT_TRUE(is_released(x.storage()));
  EXPECT_EQ(ledger().totals().all.bytes, 100);
  gate->open = true;
  EXPECT_EQ(ledger().totals().all.bytes, 0);
}

TEST(Fence, AScopesEndSweeps) {
  const auto gate = std::make_shared<Gate>();
  auto x = tensor_of(100);
  const StorageRef ref(x);
  hold(x, owner()).release(Fence(gate));
  x = at::Tensor();
  EXPECT_TRUE(ref.alive());
  gate->open = true;
  ledger().sweep();
  EXPECT_FALSE(ref.alive());
}

class Broken final : public Fence::Point {
 public:
  bool ready() const override { throw std::runtime_error("the device is lost"); }
  void wait_on_host() const override {}
  void wait_on(const c10::Stream& /*stream*/) const override {}
};

TEST(Fence, ALeaseIsStillHeldWhenItsFenceThrows) {
  auto lease = hold(tensor_of(100), owner());
  EXPECT_THROW(lease.release(Fence(std::make_shared<Broken>())), std::runtime_error);
  EXPECT_TRUE(lease.held());
  EXPECT_TRUE(lease.release());
  EXPECT_EQ(ledger().totals().all.leases, 0);
}

}  // namespace
}  // namespace tenure
