#include <tenure/core/clock.h>

#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/scope.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>
#include <thread>
#include <vector>

namespace tenure {
namespace {

using Source = Clock::Source;

// The clock is the process's, so each test first makes an announcer of its own the leader.
class Steps : public testing::Test {
 protected:
  void SetUp() override {
    me_ = ++last_;
    for (int i = 0; i < 2; ++i) {
      clock().tick(Source::explicitly, me_);
    }
    subscription_ = clock().subscribe([this](uint64_t step) { ended_.push_back(step); });
    begin_ = clock().now();
  }

  bool tick(uint64_t who, std::optional<uint64_t> number = {}) {
    return clock().tick(Source::explicitly, who, number);
  }
  uint64_t counted() const { return clock().now() - begin_; }

  static inline uint64_t last_ = uint64_t{1} << 40;
  uint64_t me_ = 0;
  uint64_t begin_ = 0;
  std::vector<uint64_t> ended_;
  Clock::Subscription subscription_;
};

TEST_F(Steps, AreCountedAndTold) {
  EXPECT_TRUE(tick(me_));
  EXPECT_TRUE(tick(me_));
  EXPECT_EQ(ended_, (std::vector{begin_, begin_ + 1}));
  EXPECT_EQ(counted(), 2);
}

TEST_F(Steps, MayBeNumbered) {
  tick(me_, 500);
  EXPECT_EQ(ended_, std::vector<uint64_t>{500});
  EXPECT_EQ(clock().now(), 501);
}

TEST_F(Steps, AnnouncedByTwoCountOnce) {
  const auto other = ++last_;
  for (int step = 0; step < 5; ++step) {
    EXPECT_TRUE(tick(me_));
    EXPECT_FALSE(tick(other));
  }
  EXPECT_EQ(counted(), 5);
}

TEST_F(Steps, ALeaderThatFellSilentGivesWay) {
  const auto other = ++last_;
  EXPECT_FALSE(tick(other)) << "could be an echo";
  EXPECT_TRUE(tick(other)) << "twice without the leader";
  EXPECT_TRUE(tick(other));
  EXPECT_EQ(counted(), 2);
}

TEST_F(Steps, AnAnnouncerMadeAnewAtEachStepIsCounted) {
  const int first = 16;
  for (int step = 0; step < first; ++step) {
    EXPECT_FALSE(tick(++last_)) << "could be one of many optimizers of one step";
  }
  for (int step = 0; step < 10; ++step) {
    EXPECT_TRUE(tick(++last_));
  }
  const auto kept = last_;
  EXPECT_TRUE(tick(kept));
  EXPECT_FALSE(tick(++last_)) << "one that stays leads again";
}

TEST_F(Steps, ManyAnnouncersOfOneStepCountOnceAfterTheFirst) {
  const auto begin = last_ + 1;
  last_ += 40;
  for (int step = 0; step < 6; ++step) {
    const auto before = clock().now();
    for (auto who = begin; who <= last_; ++who) {
      tick(who);
    }
    if (step > 0) {
      EXPECT_EQ(clock().now() - before, 1) << step;
    }
  }
}

TEST_F(Steps, ExplicitBeatsImplicitForGood) {
  const auto optimizer = ++last_;
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(clock().tick(Source::implicit, optimizer));
  }
  EXPECT_EQ(counted(), 0);
}

TEST_F(Steps, ASubscriptionEndsWithItsObject) {
  int heard = 0;
  {
    const auto subscription = clock().subscribe([&](uint64_t /*step*/) { ++heard; });
    tick(me_);
  }
  tick(me_);
  EXPECT_EQ(heard, 1);
}

TEST_F(Steps, AMovedSubscriptionGoesOn) {
  int heard = 0;
  Clock::Subscription kept;
  {
    auto subscription = clock().subscribe([&](uint64_t /*step*/) { ++heard; });
    kept = std::move(subscription);
  }
  tick(me_);
  EXPECT_EQ(heard, 1);
}

TEST_F(Steps, ASubscriberMayUseTheClock) {
  Clock::Subscription inner;
  const auto outer = clock().subscribe([&](uint64_t step) {
    EXPECT_EQ(clock().now(), step + 1);
    inner = clock().subscribe([](uint64_t) {});
  });
  tick(me_);
  EXPECT_EQ(ended_.size(), 1);
}

TEST_F(Steps, WhatOneSubscriberThrowsDoesNotSilenceOthers) {
  const auto thrower =
      clock().subscribe([](uint64_t /*step*/) { throw std::runtime_error("thrown"); });
  int heard = 0;
  const auto after = clock().subscribe([&](uint64_t /*step*/) { ++heard; });
  EXPECT_THROW(tick(me_), std::runtime_error);
  EXPECT_EQ(heard, 1);
  EXPECT_EQ(counted(), 1);
}

TEST_F(Steps, WhatASubscriberThrowsLeavesTheScopeClosed) {
  for (int i = 0; i < 2; ++i) {
    const Scope step("step");  // now step scopes lead
  }
  const auto thrower =
      clock().subscribe([](uint64_t /*step*/) { throw std::runtime_error("thrown"); });
  const Scope outer("outer");
  Scope step("step");
  EXPECT_THROW(step.close(), std::runtime_error);
  EXPECT_EQ(current_scope(), outer.id());
}

TEST_F(Steps, WhatASubscriberThrowsDoesNotEndADestructor) {
  for (int i = 0; i < 2; ++i) {
    const Scope step("step");
  }
  const auto thrower =
      clock().subscribe([](uint64_t /*step*/) { throw std::runtime_error("thrown"); });
  testing::internal::CaptureStderr();
  {
    const Scope step("step");
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "tenure: thrown\n");
  EXPECT_EQ(current_scope(), ScopeId::process);
}

TEST_F(Steps, WhatASubscriberThrowsDoesNotHideWhatWasLeft) {
  for (int i = 0; i < 2; ++i) {
    const Scope step("step");
  }
  const auto thrower =
      clock().subscribe([](uint64_t /*step*/) { throw std::runtime_error("thrown"); });
  Scope step("step", OnClose::raise);
  const auto lease = hold(at::zeros({4}), intern_owner(OwnerKind::user, "left"));
  testing::internal::CaptureStderr();
  EXPECT_THROW(step.close(), ScopeError);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "tenure: thrown\n");
}

TEST_F(Steps, AStepInsideAStepCountsOnce) {
  for (int i = 0; i < 2; ++i) {
    const Scope step("step");
  }
  ended_.clear();
  for (int64_t i = 7; i < 9; ++i) {
    const Scope step("step", i);
    const Scope between("microbatch");
    const Scope inner("step", i);
  }
  EXPECT_EQ(ended_, (std::vector<uint64_t>{7, 8}));
}

TEST_F(Steps, ASubscriberRunsInTheEnclosingScope) {
  for (int i = 0; i < 2; ++i) {
    const Scope step("step");
  }
  auto seen = ScopeId::process;
  const auto subscription = clock().subscribe([&](uint64_t /*step*/) { seen = current_scope(); });
  const Scope epoch("epoch");
  {
    const Scope step("step");
  }
  EXPECT_EQ(seen, epoch.id());
}

TEST_F(Steps, OfManyThreadsAreAllCounted) {
  subscription_ = Clock::Subscription();  // ended_ is for one thread
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([this] {
        for (int i = 0; i < 500; ++i) {
          clock().tick(Source::explicitly, me_);
        }
      });
    }
  }
  EXPECT_EQ(counted(), 4000);
}

TEST_F(Steps, WhoLeavesGivesWayToOptimizers) {
  clock().tick(Source::explicitly, me_);
  EXPECT_FALSE(clock().tick(Source::implicit, me_ + 1));
  clock().leave(me_ + 1);  // which does not lead
  EXPECT_FALSE(clock().tick(Source::implicit, me_ + 1));
  clock().leave(me_);
  EXPECT_TRUE(clock().tick(Source::implicit, me_ + 1));
  EXPECT_TRUE(clock().tick(Source::explicitly, me_));
  clock().leave(me_);
}

TEST_F(Steps, AForkedChildHasNoSubscribers) {
  const auto child = fork();
  if (child == 0) {
    alarm(20);
    clock().tick(Source::explicitly, me_);
    _exit(ended_.empty() && clock().now() == begin_ + 1 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(counted(), 0);
  tick(me_);
  EXPECT_EQ(ended_.size(), 1);
}

}  // namespace
}  // namespace tenure
