#include "fixture.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

namespace fake_accelerator {
namespace {

const auto kFake = at::TensorOptions(c10::Device(kDeviceType, 0));

class Autograd : public Fixture {};

TEST_F(Autograd, BackwardRunsOnAThreadOfTheDevice) {
  const auto x = at::ones({4}, kFake).requires_grad_();
  std::thread::id backward;
  const auto y = x.mul(2);
  y.register_hook([&](const at::Tensor& /*grad*/) { backward = std::this_thread::get_id(); });
  y.sum().backward();
  EXPECT_NE(backward, std::thread::id());
  EXPECT_NE(backward, std::this_thread::get_id());
  EXPECT_TRUE(at::equal(x.grad().cpu(), at::full({4}, 2.0)));
}

TEST_F(Autograd, EachDeviceHasItsThread) {
  std::thread::id on[kDeviceCount];
  for (c10::DeviceIndex device = 0; device < kDeviceCount; ++device) {
    const auto x = at::ones({4}, kFake.device(c10::Device(kDeviceType, device))).requires_grad_();
    const auto y = x.mul(2);
    y.register_hook([&](const at::Tensor& /*grad*/) { on[device] = std::this_thread::get_id(); });
    y.sum().backward();
  }
  EXPECT_NE(on[0], on[1]);
}

TEST_F(Autograd, BackwardUsesTheStreamOfTheForward) {
  const auto side = new_stream();
  const c10::impl::VirtualGuardImpl guard(kDeviceType);
  auto seen = guard.getStream(kFake.device());
  const auto x = at::ones({4}, kFake).requires_grad_();
  at::Tensor y;
  {
    const c10::StreamGuard on_side(side);
    y = x.mul(2);
  }
  y.register_hook([&](const at::Tensor& /*grad*/) { seen = guard.getStream(kFake.device()); });
  y.sum().backward();
  EXPECT_EQ(seen, side);
}

TEST_F(Autograd, GradientIsRightOnSlowStreams) {
  const auto side = new_stream();
  const auto x = at::ones({4}, kFake).requires_grad_();
  const auto host = at::full({4}, 3.0).pin_memory();
  at::Tensor y;
  hold(side);
  {
    const c10::StreamGuard on_side(side);
    y = x.mul(host.to(kFake.device(), /*non_blocking=*/true));
  }
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad().cpu(), host));
}

}  // namespace
}  // namespace fake_accelerator
