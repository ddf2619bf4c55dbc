#include "fixture.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cstring>
#include <functional>

namespace fake_accelerator {
namespace {

const auto kFake = at::TensorOptions(c10::Device(kDeviceType, 0));
const auto kFake1 = at::TensorOptions(c10::Device(kDeviceType, 1));
constexpr bool kNonBlocking = true;

class MemoryOf : public Fixture {
 protected:
  c10::CachingDeviceAllocator::DeviceStats stats(c10::DeviceIndex device = 0) {
    return c10::getDeviceAllocator(kDeviceType)->getDeviceStats(device);
  }
  int64_t allocated(c10::DeviceIndex device = 0) {
    return stats(device).allocated_bytes[0].current;
  }
  int64_t peak(c10::DeviceIndex device = 0) { return stats(device).allocated_bytes[0].peak; }

  at::Tensor block(double value = 1) { return at::full({256}, value, kFake); }
  at::Tensor pinned() { return at::zeros({256}).pin_memory(); }

  float poison() {
    float value = 0;
    std::memset(&value, kPoison, sizeof value);
    return value;
  }

  c10::Stream side = new_stream();
};

TEST_F(MemoryOf, BytesAreExact) {
  EXPECT_EQ(allocated(), 0);
  auto x = at::empty({3}, kFake);
  auto y = at::empty({5}, kFake.dtype(at::kByte));
  const auto view = x.view({3, 1});
  EXPECT_EQ(allocated(), 17);
  EXPECT_EQ(stats().allocation[0].current, 2);
  const auto z = x.add(x);
  EXPECT_EQ(allocated(), 29) << "an operation allocates its result and nothing else";
  y.reset();
  EXPECT_EQ(allocated(), 24);
  x.reset();
  EXPECT_EQ(allocated(), 24) << "a view keeps the storage";
  EXPECT_EQ(peak(), 29);
  c10::getDeviceAllocator(kDeviceType)->resetPeakStats(0);
  EXPECT_EQ(peak(), 24);
  EXPECT_EQ(stats().allocated_bytes[0].allocated - stats().allocated_bytes[0].freed, 24);
}

TEST_F(MemoryOf, DevicesCountApart) {
  const auto x = at::empty({4}, kFake1);
  EXPECT_EQ(allocated(0), 0);
  EXPECT_EQ(allocated(1), 16);
}

TEST_F(MemoryOf, EmptyTensorsTakeNothing) {
  const auto x = at::empty({0}, kFake);
  EXPECT_EQ(stats().allocation[0].current, 0);
}

TEST_F(MemoryOf, ResizingCountsAndKeepsContents) {
  const auto x = block(3);
  const auto before = allocated();
  x.resize_({512});
  EXPECT_EQ(allocated(), before + 1024);
  EXPECT_EQ(x[255].item<float>(), 3);
}

TEST_F(MemoryOf, LimitRaisesOutOfMemory) {
  set_memory_policy({.device_bytes = 1000});
  const auto x = at::empty({600}, kFake.dtype(at::kByte));
  EXPECT_THROW(at::empty({401}, kFake.dtype(at::kByte)), c10::OutOfMemoryError);
  EXPECT_EQ(stats().num_ooms, 1);
  const auto fits = at::empty({400}, kFake.dtype(at::kByte));
  const auto [free, total] = c10::getDeviceAllocator(kDeviceType)->getMemoryInfo(0);
  EXPECT_EQ(free, 0);
  EXPECT_EQ(total, 1000);
}

TEST_F(MemoryOf, LimitCountsTheCacheButGivesItUp) {
  set_memory_policy({.reuse_freed = true, .device_bytes = 1000});
  at::empty({600}, kFake.dtype(at::kByte));
  EXPECT_EQ(stats().reserved_bytes[0].current, 600);
  const auto x = at::empty({700}, kFake.dtype(at::kByte));
  EXPECT_EQ(stats().reserved_bytes[0].current, 700);
}

TEST_F(MemoryOf, EmptyCacheGivesBack) {
  set_memory_policy({.reuse_freed = true});
  block();
  EXPECT_EQ(stats().reserved_bytes[0].current, 1024);
  c10::getDeviceAllocator(kDeviceType)->emptyCache();
  EXPECT_EQ(stats().reserved_bytes[0].current, 0);
}

TEST_F(MemoryOf, PinnedMemoryIsCounted) {
  auto* host = at::getHostAllocator(kDeviceType);
  auto x = pinned();
  EXPECT_TRUE(x.is_pinned());
  EXPECT_TRUE(x.slice(0, 10).is_pinned());
  EXPECT_FALSE(at::zeros({4}).is_pinned());
  EXPECT_EQ(host->get_stats().active_bytes.current, 1024);
  x.reset();
  EXPECT_EQ(host->get_stats().active_bytes.current, 0);
}

// --- use after free --------------------------------------------------------------------------

TEST_F(MemoryOf, FreedMemoryIsPoisoned) {
  set_memory_policy({.poison_freed = true});
  auto x = block();
  const auto host = pinned();
  hold(side);
  {
    const c10::StreamGuard guard(side);
    host.copy_(x, kNonBlocking);
  }
  x.reset();
  release(side);
  EXPECT_EQ(host.const_data_ptr<float>()[0], poison());
}

TEST_F(MemoryOf, FreshMemoryIsPoisonedToo) {
  set_memory_policy({.poison_freed = true});
  EXPECT_EQ(at::empty({4}, kFake)[0].item<float>(), poison());
}

TEST_F(MemoryOf, FreeIsOrderedAfterTheHomeStreamsOwnWork) {
  set_memory_policy({.poison_freed = true});
  const auto host = pinned();
  const c10::StreamGuard guard(side);
  auto x = block();
  hold(side);
  host.copy_(x, kNonBlocking);
  x.reset();
  release(side);
  EXPECT_EQ(host.const_data_ptr<float>()[0], 1) << "needs no fence, as on CUDA";
}

class Reuse : public MemoryOf {
 protected:
  // Copies a block to the host on a slow stream, drops it, and has the next tensor made at once.
  // What reaches the host shows whether the block was given away too early.
  float offload(const std::function<void(const at::Tensor&)>& before_free) {
    set_memory_policy({.reuse_freed = true});
    auto x = block(1);
    const auto host = pinned();
    hold(side);
    {
      const c10::StreamGuard guard(side);
      host.copy_(x, kNonBlocking);
    }
    before_free(x);
    const void* address = x.const_data_ptr();
    x.reset();
    const auto next = block(2);
    reused = next.const_data_ptr() == address;
    release(side);
    return host.const_data_ptr<float>()[0];
  }

  bool reused = false;
};

TEST_F(Reuse, WithoutAFenceTheNextTensorIsCopied) {
  EXPECT_EQ(offload([](const at::Tensor&) {}), 2);
  EXPECT_TRUE(reused);
}

TEST_F(Reuse, RecordStreamKeepsTheBlock) {
  EXPECT_EQ(offload([this](const at::Tensor& x) { x.record_stream(side); }), 1);
  EXPECT_FALSE(reused);
  EXPECT_TRUE(stats().active_bytes[0].current == allocated()) << "free once the stream passed";
}

TEST_F(Reuse, FenceOnTheHomeStreamKeepsTheDataWithoutKeepingTheBlock) {
  const auto fence = [this](const at::Tensor& /*x*/) {
    c10::Event copied(kDeviceType);
    copied.record(side);
    copied.block(c10::Stream(c10::Stream::DEFAULT, c10::Device(kDeviceType, 0)));
  };
  EXPECT_EQ(offload(fence), 1);
  EXPECT_TRUE(reused);
}

TEST_F(Reuse, AnotherStreamsCacheIsNotTouched) {
  set_memory_policy({.reuse_freed = true});
  auto x = block();
  const void* address = x.const_data_ptr();
  x.reset();
  const c10::StreamGuard guard(side);
  EXPECT_NE(at::empty({256}, kFake).const_data_ptr(), address);
}

TEST_F(Reuse, PinnedMemoryWaitsForItsCopy) {
  set_memory_policy({.reuse_freed = true});
  const auto x = block(1);
  auto host = pinned();
  const void* address = host.const_data_ptr();
  hold(side);
  {
    const c10::StreamGuard guard(side);
    host.copy_(x, kNonBlocking);
  }
  host.reset();
  EXPECT_NE(pinned().const_data_ptr(), address);
  release(side);
  const auto first = pinned();
  const auto second = pinned();
  EXPECT_TRUE(first.const_data_ptr() == address || second.const_data_ptr() == address);
}

}  // namespace
}  // namespace fake_accelerator
