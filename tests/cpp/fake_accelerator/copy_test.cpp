#include "fixture.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cmath>
#include <thread>
#include <vector>

namespace fake_accelerator {
namespace {

const auto kFake = at::TensorOptions(c10::Device(kDeviceType, 0));
const auto kFake1 = at::TensorOptions(c10::Device(kDeviceType, 1));
constexpr bool kNonBlocking = true;

class Copies : public Fixture {
 protected:
  void copy_on_side(const at::Tensor& to, const at::Tensor& from) {
    const c10::StreamGuard guard(side);
    to.copy_(from, kNonBlocking);
  }

  at::Tensor pinned(double value) { return at::full({4}, value).pin_memory(); }

  float first(const at::Tensor& host) { return host.const_data_ptr<float>()[0]; }

  c10::Stream main = c10::Stream(c10::Stream::DEFAULT, c10::Device(kDeviceType, 0));
  c10::Stream side = new_stream();
};

TEST_F(Copies, ReadWithoutAFenceSeesOldData) {
  const auto x = at::zeros({4}, kFake);
  hold(side);
  copy_on_side(x, pinned(1));
  EXPECT_EQ(first(x.cpu()), 0);
  EXPECT_EQ(first(x.add(1).cpu()), 1) << "compute reads what is there";
  EXPECT_EQ(pending(side), 1);
}

TEST_F(Copies, ReadBehindAFenceSeesNewData) {
  const auto x = at::zeros({4}, kFake);
  hold(side);
  copy_on_side(x, pinned(1));
  c10::Event copied(kDeviceType);
  copied.record(side);
  copy_on_side(x, pinned(2));
  copied.block(main);
  EXPECT_EQ(first(x.add(1).cpu()), 2) << "forced up to the event and no further";
  EXPECT_EQ(pending(side), 1);
}

TEST_F(Copies, PinnedHostMemoryIsFilledLate) {
  const auto x = at::ones({4}, kFake);
  const auto host = pinned(0);
  hold(side);
  copy_on_side(host, x);
  EXPECT_EQ(first(host), 0);
  release(side);
  EXPECT_EQ(first(host), 1);
  EXPECT_EQ(waits().host, 0);
}

TEST_F(Copies, QueuedCopyReadsItsSourceLate) {
  const auto x = at::ones({4}, kFake);
  const auto host = pinned(0);
  hold(side);
  copy_on_side(host, x);
  x.fill_(5);
  release(side);
  EXPECT_EQ(first(host), 5) << "the writer did not wait for the copy";
}

TEST_F(Copies, FromPageableMemoryTheSourceIsReadAtOnce) {
  const auto x = at::zeros({4}, kFake);
  auto host = at::ones({4});
  hold(side);
  copy_on_side(x, host);
  host.fill_(9);
  EXPECT_EQ(pending(side), 1);
  release(side);
  EXPECT_EQ(first(x.cpu()), 1);
}

TEST_F(Copies, IntoPageableMemoryTheHostWaits) {
  const auto x = at::ones({4}, kFake);
  const auto host = at::zeros({4});
  hold(side);
  copy_on_side(host, x);
  EXPECT_EQ(first(host), 1);
  EXPECT_EQ(waits().host, 1);
}

TEST_F(Copies, BlockingCopyAndItemMakeTheHostWait) {
  const auto x = at::zeros({4}, kFake);
  x.copy_(pinned(3));
  EXPECT_EQ(waits().host, 1);
  EXPECT_EQ(x[0].item<float>(), 3);
  EXPECT_EQ(waits().host, 2);
  x.add_(1);
  EXPECT_EQ(waits().host, 2) << "compute does not";
}

TEST_F(Copies, BetweenTensorsOfADeviceIsQueuedToo) {
  const auto x = at::zeros({4}, kFake);
  const auto y = at::ones({4}, kFake);
  hold(side);
  copy_on_side(x, y);
  EXPECT_EQ(first(x.cpu()), 0);
  release(side);
  EXPECT_EQ(first(x.cpu()), 1);
}

TEST_F(Copies, AcrossDevicesEachSideWaitsForTheOther) {
  const auto x = at::ones({4}, kFake);
  const auto y = at::zeros({4}, kFake1);
  const c10::StreamGuard guard(side);
  hold(side);
  x.copy_(pinned(2), kNonBlocking);
  y.copy_(x, kNonBlocking);
  EXPECT_EQ(first(y.cpu()), 2) << "device 1's stream waits for the copy, which is behind x's";
}

TEST_F(Copies, MemsetKernelIsDelayed) {
  const auto x = at::zeros({4}, kFake);
  hold(side);
  {
    const c10::StreamGuard guard(side);
    launch_memset(x, 0xFF);
  }
  EXPECT_EQ(first(x.cpu()), 0);
  release(side);
  EXPECT_TRUE(std::isnan(first(x.cpu())));
  EXPECT_THROW(launch_memset(at::zeros({4}), 0), c10::Error);
}

TEST_F(Copies, ValuesAreThoseOfTheCpu) {
  const auto host = at::arange(24, at::kFloat).view({2, 3, 4});
  const auto device = host.to(kFake.device());
  EXPECT_TRUE(at::equal(device.cpu(), host));
  EXPECT_TRUE(at::equal(device.transpose(0, 2).cpu(), host.transpose(0, 2)));
  EXPECT_TRUE(at::equal(device.slice(2, 1, 4, 2).contiguous().cpu(), host.slice(2, 1, 4, 2)));
  EXPECT_TRUE(at::equal(device.to(at::kLong).cpu(), host.to(at::kLong)));
  EXPECT_TRUE(at::equal(device.to(kFake1.device()).cpu(), host));

  const auto strided = at::zeros({4, 3}, kFake).t();
  strided.copy_(host[0]);
  EXPECT_TRUE(at::equal(strided.cpu(), host[0]));
  const auto broadcast = at::zeros({5, 4}, kFake);
  broadcast.copy_(host[0][1]);
  EXPECT_TRUE(at::equal(broadcast.cpu(), host[0][1].expand({5, 4})));
  const auto converted = at::zeros({2, 3, 4}, kFake.dtype(at::kDouble));
  converted.copy_(host);
  EXPECT_TRUE(at::equal(converted.cpu(), host.to(at::kDouble)));
  const auto halves = at::empty({2, 3, 4}, at::kHalf);
  halves.copy_(device);
  EXPECT_TRUE(at::equal(halves, host.to(at::kHalf)));
}

TEST_F(Copies, FencedCopiesOfManyThreadsAreRight) {
  shuffle(1);
  const auto work = [this] {
    const auto own = new_stream();
    const auto host = pinned(0);
    for (int i = 1; i <= 200; ++i) {
      host.fill_(i);
      const auto x = at::zeros({4}, kFake);
      c10::Event copied(kDeviceType);
      {
        const c10::StreamGuard guard(own);
        x.copy_(host, kNonBlocking);
        copied.record(own);
      }
      copied.block(main);
      ASSERT_EQ(first(x.add(1).cpu()), i + 1);
    }
  };
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back(work);
  }
}

TEST_F(Copies, ConjugateViewsAreResolved) {
  const auto host = at::view_as_complex(at::arange(6, at::kFloat).view({3, 2}));
  const auto device = host.to(kFake.device());
  EXPECT_TRUE(at::equal(device.conj().cpu().resolve_conj(), host.conj().resolve_conj()));
}

TEST_F(Copies, ResultsAreOnTheDeviceThoughTheFirstArgumentIsACpuScalar) {
  const auto x = at::ones({4}, kFake);
  const auto y = at::where(at::ones({}, at::kBool), x, x.neg());
  EXPECT_EQ(y.device(), kFake.device());
}

}  // namespace
}  // namespace fake_accelerator
