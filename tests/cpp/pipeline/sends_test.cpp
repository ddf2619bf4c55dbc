#include <tenure/pipeline/sends.h>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace tenure::pipeline {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Like Gloo's: it tells that it has ended to who waits, and to nobody else.
class Slow : public c10d::Work {
 public:
  bool wait(milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [&] { return ended_ || !error_.empty(); })) {
      error_ = "late";
      changed_.notify_all();
    }
    if (!error_.empty()) {
      throw std::runtime_error(error_);
    }
    return true;
  }
  bool isCompleted() override { return false; }
  void abort() override { end("aborted"); }

  void end(std::string error = {}) {
    std::lock_guard lock(mutex_);
    ended_ = true;
    error_ = std::move(error);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::string error_;
};

using SlowPtr = c10::intrusive_ptr<Slow>;

SlowPtr slow() { return c10::make_intrusive<Slow>(); }

Message to(uint32_t peer, uint32_t microbatch) { return {.microbatch = microbatch, .peer = peer}; }

Send sending(const Message& message, const SlowPtr& work, const at::Tensor& tensor = at::ones(4)) {
  Send out;
  out.message = message;
  out.add_on_host(work);
  out.tensors.emplace_back(tensor, intern_owner(OwnerKind::communication, "a test's"));
  return out;
}

bool any(const Send& /*send*/) { return true; }

// Whether so many are left, at once or within seconds.
bool comes_down_to(Sends& sends, size_t count) {
  const auto end = steady_clock::now() + std::chrono::seconds(10);
  while (sends.count(any) != count && steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
    sends.settle();
  }
  return sends.count(any) == count;
}

TEST(Sends, WhatHasLeftGoesWhenItIsSettled) {
  Sends sends(milliseconds(1000));
  const auto first = slow();
  const auto second = slow();
  auto tensor = at::ones(4);
  sends.add(sending(to(1, 0), first, tensor));
  sends.add(sending(to(1, 1), second));
  EXPECT_EQ(sends.bytes(), 32);
  sends.settle();
  EXPECT_EQ(sends.count(any), 2);
  first->end();
  EXPECT_TRUE(comes_down_to(sends, 1));
  EXPECT_EQ(sends.bytes(), 16);
  EXPECT_EQ(tensor.storage().use_count(), 1);
  second->end();
  EXPECT_TRUE(comes_down_to(sends, 0));
}

TEST(Sends, APeerThatTakesNothingHoldsUpNoOther) {
  Sends sends(milliseconds(1000));
  const auto stuck = slow();
  const auto quick = slow();
  sends.add(sending(to(1, 0), stuck));
  sends.add(sending(to(2, 0), quick));
  quick->end();
  EXPECT_TRUE(comes_down_to(sends, 1));
  EXPECT_EQ(sends.take(any)->message.peer, 1);
  stuck->end();
}

TEST(Sends, WhoWaitsHearsWhatTheBackendSays) {
  Sends sends(milliseconds(10'000));
  const auto broken = slow();
  sends.add(sending(to(1, 0), broken));
  broken->end("Connection closed by peer");
  std::this_thread::sleep_for(milliseconds(20));
  sends.settle();  // leaves it to who waits
  const auto one = sends.take(any);
  ASSERT_TRUE(one);
  try {
    sends.wait(*one);
    FAIL();
  } catch (const std::exception& error) {
    EXPECT_STREQ(error.what(), "Connection closed by peer");
  }
  EXPECT_FALSE(sends.take(any));
}

TEST(Sends, WhoWaitsForTooLongBreaksTheConnectionOff) {
  Sends sends(milliseconds(50));
  const auto stuck = slow();
  sends.add(sending(to(1, 0), stuck));
  const auto begin = steady_clock::now();
  EXPECT_THROW(sends.wait(*sends.take(any)), std::exception);
  EXPECT_GE(steady_clock::now() - begin, milliseconds(50));
  EXPECT_THROW(stuck->wait(milliseconds(10'000)), std::exception);  // at once: all have heard of it
  EXPECT_LT(steady_clock::now() - begin, milliseconds(5000));
}

TEST(Sends, WhatIsUnderWayAtItsEndIsGivenUp) {
  const auto stuck = slow();
  auto tensor = at::ones(4);
  const auto begin = steady_clock::now();
  {
    Sends sends(milliseconds(10'000));
    sends.add(sending(to(1, 0), stuck, tensor));
  }
  EXPECT_LT(steady_clock::now() - begin, milliseconds(5000));
  EXPECT_EQ(tensor.storage().use_count(), 1);
}

}  // namespace
}  // namespace tenure::pipeline
