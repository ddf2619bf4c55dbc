// Fences and releases on the fake accelerator, whose streams a test can hold.
#include <tenure/core/fence.h>

#include "fixture.h"
#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>
#include <tenure/core/release.h>
#include <tenure/core/storage_ref.h>

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

namespace tenure {
namespace {

const c10::Device kDevice(fake_accelerator::kDeviceType, 0);

OwnerId owner() { return intern_owner(OwnerKind::host_copy, "test"); }
at::Tensor filled(int64_t bytes, int value) {
  return at::full({bytes}, value, at::TensorOptions(at::kByte).device(kDevice));
}
// What the device's allocator has given out.
int64_t used() {
  return c10::getDeviceAllocator(fake_accelerator::kDeviceType)
      ->getDeviceStats(0)
      .allocated_bytes[0]
      .current;
}

class FenceOnADevice : public fake_accelerator::Fixture {
 protected:
  void SetUp() override {
    Fixture::SetUp();
    side_.emplace(fake_accelerator::new_stream());
    fake_accelerator::hold(*side_);
    host_ = at::zeros({64}, at::kByte).pin_memory();
  }
  void TearDown() override {
    host_ = at::Tensor();
    fake_accelerator::release(*side_);
    EXPECT_EQ(ledger().totals().all.leases, 0);
    Fixture::TearDown();
  }

  // Queues a copy to the host on the slow stream.
  void copy_later(const at::Tensor& from) {
    const c10::StreamGuard guard(*side_);
    host_.copy_(from, /*non_blocking=*/true);
  }
  // What the copy brings, once other tensors had their chance to take the memory.
  int copied() {
    filled(64, 2);
    fake_accelerator::release(*side_);
    fake_accelerator::hold(*side_);
    return host_[0].item<uint8_t>();
  }

  std::optional<c10::Stream> side_;
  at::Tensor host_;
};

TEST_F(FenceOnADevice, FollowsItsStream) {
  const auto fence = Fence::record(*side_);
  EXPECT_FALSE(fence.ready());
  fake_accelerator::advance(*side_);
  EXPECT_TRUE(fence.ready());
}

TEST_F(FenceOnADevice, OfADeviceIsOnTheCurrentStream) {
  const auto fence = [&] {
    const c10::StreamGuard guard(*side_);
    return Fence::record(kDevice);
  }();
  EXPECT_FALSE(fence.ready());
  fake_accelerator::release(*side_);
  EXPECT_TRUE(fence.ready());
}

TEST_F(FenceOnADevice, TheHostWaitsForIt) {
  const auto fence = Fence::record(*side_);
  fence.wait();
  EXPECT_TRUE(fence.ready());
}

TEST_F(FenceOnADevice, AStreamWaitsForItAndTheHostDoesNot) {
  const auto x = filled(64, 0);
  const auto source = at::full({64}, 7, at::kByte).pin_memory();
  {
    const c10::StreamGuard guard(*side_);
    x.copy_(source, /*non_blocking=*/true);
  }
  const auto fence = Fence::record(*side_);
  const auto current = c10::impl::VirtualGuardImpl(kDevice.type()).getStream(kDevice);
  fence.wait(current);
  EXPECT_EQ(fake_accelerator::waits().host, 0);
  EXPECT_EQ(x.cpu()[0].item<uint8_t>(), 7);
}

TEST_F(FenceOnADevice, ALeaseBehindItIsKeptAndCounted) {
  auto x = filled(64, 1);
  const StorageRef ref(x);
  const auto before = used();
  auto lease = hold(x, owner());
  x = at::Tensor();
  lease.release(Fence::record(*side_));
  EXPECT_FALSE(lease.held());
  EXPECT_TRUE(ref.alive());
  EXPECT_EQ(used(), before);
  EXPECT_EQ(ledger().totals().all.bytes, 64);
  fake_accelerator::release(*side_);
  EXPECT_EQ(ledger().totals().all.bytes, 0);
  EXPECT_EQ(used(), before - 64);
}

TEST_F(FenceOnADevice, ALeasesMemoryIsNotGivenToOthersBeforeIt) {
  fake_accelerator::set_memory_policy({.reuse_freed = true});
  const auto offload = [&](bool fenced) {
    auto x = filled(64, 1);
    auto lease = hold(x, owner());
    copy_later(x);
    x = at::Tensor();
    if (fenced) {
      lease.release(Fence::record(*side_));
    } else {
      lease.release();
    }
    return copied();
  };
  EXPECT_EQ(offload(false), 2) << "without a fence the copy must be wrong here";
  EXPECT_EQ(offload(true), 1);
}

TEST_F(FenceOnADevice, AStoragesMemoryIsNotGivenToOthersBeforeIt) {
  fake_accelerator::set_memory_policy({.reuse_freed = true});
  const auto offload = [&](bool fenced) {
    const auto x = filled(64, 1);
    copy_later(x);
    release_storage(x, {.name = "test", .site = ""}, fenced ? Fence::record(*side_) : Fence());
    return copied();
  };
  EXPECT_EQ(offload(false), 2) << "without a fence the copy must be wrong here";
  EXPECT_EQ(offload(true), 1);
}

TEST_F(FenceOnADevice, AStoragesMemoryIsNotFreedBeforeIt) {
  fake_accelerator::set_memory_policy({.poison_freed = true});
  const auto offload = [&](bool fenced) {
    const auto x = filled(64, 1);
    copy_later(x);
    release_storage(x, {.name = "test", .site = ""}, fenced ? Fence::record(*side_) : Fence());
    return copied();
  };
  EXPECT_EQ(offload(false), fake_accelerator::kPoison) << "it must be wrong here";
  EXPECT_EQ(offload(true), 1);
}

TEST_F(FenceOnADevice, AReleasedStorageMayBeRefilledWhileItsOldMemoryWaits) {
  const auto x = filled(64, 1);
  const auto before = used();
  release_storage(x, {.name = "test", .site = ""}, Fence::record(*side_));
  refill_storage(x, filled(64, 5));
  EXPECT_EQ(x.cpu()[63].item<uint8_t>(), 5);
  EXPECT_EQ(used(), before + 64);
  fake_accelerator::release(*side_);
  ledger().sweep();
  EXPECT_EQ(used(), before);
}

}  // namespace
}  // namespace tenure
