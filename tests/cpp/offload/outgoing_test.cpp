#include <tenure/offload/outgoing.h>

#include <tenure/core/hold.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

namespace tenure::offload {
namespace {

constexpr size_t kBytes = 4096;

// Memory that is given back when it may, and a while later.
struct Slow {
  std::promise<void> begun;
  std::promise<void> may_end;
  std::atomic<bool> ended = false;

  c10::Storage storage() {
    const auto free = [](void* slow) {
      auto& self = *static_cast<Slow*>(slow);
      self.begun.set_value();
      self.may_end.get_future().wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      self.ended = true;
    };
    return {c10::Storage::use_byte_size_t(), c10::SymInt(kBytes),
            c10::DataPtr(this, this, free, c10::Device(c10::DeviceType::CPU)), nullptr, false};
  }
};

TEST(Outgoing, WhatAnotherThreadLetsGoIsHeldUntilItHasGone) {
  Slow slow;
  Outgoing outgoing;
  outgoing.add({.key = &slow,
                .bytes = kBytes,
                .compute = c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU)),
                .lease = hold(slow.storage(), intern_owner(OwnerKind::activation, "slow", ""),
                              ScopeId::process),
                .left = Fence()});
  slow.begun.get_future().wait();  // its own thread does it
  EXPECT_EQ(outgoing.bytes(), 0U);
  const auto nobody = [](const Outgoing::Leaving&) { FAIL() << "there is nothing to wait for"; };
  outgoing.limit(kBytes, 0, nobody);
  EXPECT_FALSE(slow.ended) << "there was room for it";
  slow.may_end.set_value();
  outgoing.limit(kBytes - 1, 0, nobody);
  EXPECT_TRUE(slow.ended);
}

}  // namespace
}  // namespace tenure::offload
