// A device that has failed, as after a kernel's assertion, answers every question with an error.
// The program must live to tell: threads and destructors of ours do not end it.
#include <tenure/core/hold.h>
#include <tenure/offload/host_pool.h>
#include <tenure/offload/outgoing.h>
#include <tenure/offload/saved.h>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <future>
#include <limits>
#include <memory>

namespace tenure::offload {
namespace {

class Failed final : public Fence::Point {
 public:
  bool ready() const override {
    if (!asked_) {
      asked_ = true;
      was_asked.set_value();
    }
    TORCH_CHECK(false, "device-side assert triggered");
  }
  void wait_on_host() const override { TORCH_CHECK(false, "device-side assert triggered"); }
  void wait_on(const c10::Stream& /*stream*/) const override {
    TORCH_CHECK(false, "device-side assert triggered");
  }
  mutable std::promise<void> was_asked;

 private:
  mutable bool asked_ = false;
};

const c10::Stream kStream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU));

c10::Storage page() {
  return {c10::Storage::use_byte_size_t(), c10::SymInt(4096), c10::GetCPUAllocator(), true};
}

Lease held_page() {
  return hold(page(), intern_owner(OwnerKind::activation, "test", ""), ScopeId::process);
}

TEST(FailedDevice, TheThreadThatLetsGoEndsQuietly) {
  const auto failed = std::make_shared<Failed>();
  Outgoing outgoing;
  outgoing.add({.key = &outgoing,
                .bytes = 4096,
                .compute = kStream,
                .lease = held_page(),
                .left = Fence(failed)});
  failed->was_asked.get_future().wait();
  EXPECT_THROW(outgoing.settle(), c10::Error) << "whoever asks hears of it";
  EXPECT_EQ(outgoing.bytes(), 4096U);
}

TEST(FailedDevice, WhatWasFetchedMayGo) {
  auto saved = std::make_unique<SavedStorage>(page(), kStream);
  saved->fetched = held_page();
  saved->arrived = Fence(std::make_shared<Failed>());
  const StorageRef fetched(saved->fetched.storage());
  saved.reset();
  EXPECT_FALSE(fetched.alive());
}

TEST(FailedDevice, HostMemoryMayGo) {
  auto pool = std::make_unique<HostPool>(host_memory_for(c10::DeviceType::CPU),
                                         std::numeric_limits<uint64_t>::max());
  auto pieces = pool->take(4096);
  pieces[0].busy.back = Fence(std::make_shared<Failed>());
  pool->give(std::move(pieces[0]));
  EXPECT_NO_THROW(pool.reset());
}

}  // namespace
}  // namespace tenure::offload
