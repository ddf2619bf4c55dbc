// Which scope is current on the threads that autograd uses for a device.
#include <tenure/core/scope.h>

#include "fixture.h"
#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace tenure {
namespace {

const auto kFake = at::TensorOptions(c10::Device(fake_accelerator::kDeviceType, 0));

std::string path() { return ledger().scopes().path(current_scope()); }

class ScopeOnADevice : public fake_accelerator::Fixture {
 protected:
  // A loss whose backward calls `see` on a thread of the device.
  template <class See>
  static at::Tensor loss(See see) {
    auto y = at::ones({4}, kFake).requires_grad_().mul(2);
    y.register_hook([see, caller = std::this_thread::get_id()](const at::Tensor& /*grad*/) {
      EXPECT_NE(std::this_thread::get_id(), caller) << "not on a thread of the device";
      see();
    });
    return y.sum();
  }
};

TEST_F(ScopeOnADevice, AHookRunsInTheScopeOfBackward) {
  std::string seen;
  auto graph = [&] {
    const Scope forward("forward");
    return loss([&] { seen = path(); });
  }();
  const Scope step("step", 7);
  graph.backward();
  EXPECT_EQ(seen, "step 7");
}

TEST_F(ScopeOnADevice, ALeaseOfAHookEndsWithTheScopeOfBackward) {
  Lease lease;
  auto graph =
      loss([&] { lease = hold(at::ones({4}, kFake), intern_owner(OwnerKind::gradient, "hook")); });
  Scope step("step", 7, OnClose::release);
  graph.backward();
  EXPECT_TRUE(lease.held());
  EXPECT_EQ(step.close().leases, 1);
  EXPECT_FALSE(lease.held());
}

TEST_F(ScopeOnADevice, BackwardOutsideOfScopesIsInNone) {
  std::string seen;
  auto graph = loss([&] { seen = path(); });
  {
    const Scope step("step", 7);
  }
  graph.backward();
  EXPECT_EQ(seen, "process");
}

TEST_F(ScopeOnADevice, AScopeOpenedInAHookLiesInside) {
  std::vector<std::string> seen;
  auto graph = loss([&] {
    {
      const Scope inside("hook");
      seen.push_back(path());
    }
    seen.push_back(path());
  });
  const Scope step("step", 7);
  graph.backward();
  EXPECT_EQ(seen, (std::vector<std::string>{"step 7 / hook", "step 7"}));
}

TEST_F(ScopeOnADevice, ReentrantBackwardHasTheScopeItWasCalledIn) {
  std::vector<std::string> seen;
  auto graph = loss([&] {
    const auto nested = [&] {
      const c10::AutoGradMode enabled(true);
      auto y = at::ones({4}, kFake).requires_grad_().mul(2);
      y.register_hook([&](const at::Tensor& /*grad*/) { seen.push_back(path()); });
      y.sum().backward();
    };
    nested();
    {
      const Scope inner("inner");
      nested();
    }
    seen.push_back(path());
  });
  const Scope step("step", 7);
  graph.backward();
  EXPECT_EQ(seen, (std::vector<std::string>{"step 7", "step 7 / inner", "step 7"}));
}

TEST_F(ScopeOnADevice, ThreadsThatCallBackwardHaveTheirOwn) {
  std::vector<std::vector<std::string>> seen(2);
  {
    std::vector<std::jthread> threads;
    for (int64_t t = 0; t < 2; ++t) {
      threads.emplace_back([&mine = seen[static_cast<size_t>(t)], t] {
        for (int i = 0; i < 20; ++i) {
          const Scope step("step", t);
          loss([&] { mine.push_back(path()); }).backward();
        }
      });
    }
  }
  EXPECT_EQ(seen[0], std::vector<std::string>(20, "step 0"));
  EXPECT_EQ(seen[1], std::vector<std::string>(20, "step 1"));
}

}  // namespace
}  // namespace tenure
