#include <tenure/core/lease.h>

#include "objects.h"
#include <tenure/core/events.h>
#include <tenure/core/ledger.h>
#include <tenure/core/scope.h>

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <random>
#include <thread>
#include <vector>

namespace tenure {
namespace {

using test::Object;

OwnerId some_owner(OwnerKind kind) { return intern_owner(kind, "test"); }

Lease lease_new(uint64_t bytes, OwnerKind kind, ScopeId scope) {
  return {new Object, bytes, 0, some_owner(kind), scope};
}

class Mailbox {
 public:
  void put(Lease lease) {
    std::lock_guard lock(mutex_);
    leases_.push_back(std::move(lease));
  }
  Lease take() {
    std::lock_guard lock(mutex_);
    if (leases_.empty()) {
      return {};
    }
    auto lease = std::move(leases_.back());
    leases_.pop_back();
    return lease;
  }

 private:
  std::mutex mutex_;
  std::vector<Lease> leases_;
};

// Sixteen threads take, move, hand over and release leases and close scopes with every policy while
// one more reads; in the end the totals are exactly zero and no object is left.
TEST(Concurrency, SixteenThreadsLeaveNothingBehind) {
  constexpr int kThreads = 16;
  constexpr int kRounds = 400;
  ASSERT_EQ(ledger().totals().all.leases, 0);
  const auto alive_before = Object::alive.load();
  Mailbox mailbox;
  {
    std::jthread reader([](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        const auto totals = ledger().totals();
        uint64_t leases = 0;
        uint64_t bytes = 0;
        for (const auto& kind : totals.by_kind) {
          leases += kind.leases;
          bytes += kind.bytes;
        }
        // Every object here has leases of one kind only, so a cut that is consistent adds up.
        EXPECT_EQ(leases, totals.all.leases);
        EXPECT_EQ(bytes, totals.all.bytes);
        const auto snapshot = ledger().snapshot();
        EXPECT_LE(snapshot.bytes_once(), snapshot.size() * 4096);
      }
    });
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([t, &mailbox] {
        std::mt19937 random(t);
        const auto kind = static_cast<OwnerKind>(t % kOwnerKinds);
        for (int round = 0; round < kRounds; ++round) {
          const auto policy = round % 2 == 0 ? OnClose::release : OnClose::report;
          Scope step("step", round, policy);
          std::vector<Lease> mine;
          for (int i = 0; i < 8; ++i) {
            mine.push_back(lease_new(1 + random() % 4096, kind, current_scope()));
          }
          {
            Scope inner("microbatch", round, OnClose::release);
            mine.push_back(lease_new(64, kind, current_scope()));
            mine[random() % mine.size()].transfer(inner.id());
          }
          mine[0].release();
          if (mine[1].held()) {
            mine[1].transfer(ScopeId::process);
            mailbox.put(std::move(mine[1]));
          }
          auto other = mailbox.take();
          other.release();
          if (policy == OnClose::report) {
            mine.clear();
          }
          step.close();
        }
      });
    }
    threads.clear();  // joins
  }
  while (mailbox.take().held()) {
  }
  const auto totals = ledger().totals();
  EXPECT_EQ(totals.all.leases, 0);
  EXPECT_EQ(totals.all.bytes, 0);
  for (const auto& kind : totals.by_kind) {
    EXPECT_EQ(kind.leases, 0);
    EXPECT_EQ(kind.bytes, 0);
  }
  EXPECT_EQ(Object::alive.load(), alive_before);
}

struct Taken {
  size_t all = 0;
  size_t held = 0;  // all of these in the process scope
};

Taken count(const std::vector<std::vector<Lease>>& taken) {
  Taken out;
  for (const auto& leases : taken) {
    out.all += leases.size();
    for (const auto& lease : leases) {
      const auto row = lease.row();
      out.held += row ? 1 : 0;
      EXPECT_TRUE(!row || row->scope == ScopeId::process);
    }
  }
  return out;
}

// Threads take leases in a scope while its own thread closes it: each lease is either released by
// the close or lands in the process scope; none is lost in between.
TEST(Concurrency, LeasesTakenWhileTheirScopeClosesAreNeverLost) {
  for (int round = 0; round < 200; ++round) {
    const auto alive_before = Object::alive.load();
    std::vector<std::vector<Lease>> taken(3);
    {
      std::atomic<bool> stop{false};
      std::vector<std::jthread> takers;
      Scope scope("closing", round, OnClose::release);
      for (auto& leases : taken) {
        takers.emplace_back([&leases, &stop, id = scope.id()] {
          while (!stop.load() && leases.size() < 2000) {
            leases.push_back(lease_new(8, OwnerKind::user, id));
          }
        });
      }
      std::this_thread::yield();
      const auto report = scope.close();
      stop.store(true);
      takers.clear();
      const auto [all, held] = count(taken);
      EXPECT_EQ(report.leases + held, all);
      EXPECT_EQ(ledger().totals().all.leases, held);
    }
    taken.clear();
    ASSERT_EQ(Object::alive.load(), alive_before);
  }
}

// Threads open and close scopes inside one that an exception ends: those move up, and what was
// leased in them is either released with the outer one or lands in the process scope.
TEST(Concurrency, ScopesOfOthersMoveUpWhenAnExceptionEndsTheirs) {
  auto& scopes = ledger().scopes();
  uint32_t moved = 0;
  for (int round = 0; round < 200; ++round) {
    const auto alive_before = Object::alive.load();
    const auto outer = scopes.open({intern("outer"), round}, OnClose::release, ScopeId::process);
    std::vector<std::vector<Lease>> taken(3);
    std::atomic<bool> stop{false};
    std::vector<std::jthread> others;
    for (auto& leases : taken) {
      others.emplace_back([&leases, &stop, &scopes, outer] {
        while (!stop.load() && leases.size() < 2000) {
          const auto inner = scopes.open({intern("inner"), {}}, OnClose::report, outer);
          leases.push_back(lease_new(8, OwnerKind::user, inner));
          close_scope(inner, Ending::normal);
        }
      });
    }
    std::this_thread::yield();
    const auto report = close_scope(outer, Ending::exception);
    moved += report.moved_up;
    stop.store(true);
    others.clear();
    const auto [all, held] = count(taken);
    EXPECT_EQ(report.leases + held, all);
    taken.clear();
    ASSERT_EQ(Object::alive.load(), alive_before);
  }
  EXPECT_GT(moved, 0) << "no scope was open inside: this tests nothing";
  EXPECT_EQ(ledger().totals().all.leases, 0);
}

TEST(Concurrency, EventsOfManyThreadsArriveInOrderOrAreCounted) {
  constexpr int kThreads = 8;
  constexpr uint64_t kEvents = 20000;
  EventReader reader(1024);
  std::vector<Event> seen;
  {
    std::vector<std::jthread> threads;
    for (uint64_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([t] {
        for (uint64_t i = 0; i < kEvents; ++i) {
          append({.storage = t, .type = EventType::step, .value = i});
        }
      });
    }
    for (int i = 0; i < 200; ++i) {
      reader.drain(seen);
    }
  }
  reader.drain(seen);
  std::vector<uint64_t> next(kThreads, 0);
  for (const auto& event : seen) {
    ASSERT_LT(event.storage, kThreads);
    EXPECT_GE(event.value, next[event.storage]);
    next[event.storage] = event.value + 1;
    EXPECT_NE(event.thread, 0);
  }
  EXPECT_EQ(seen.size() + reader.dropped(), kThreads * kEvents);
}

TEST(Concurrency, ADeleterMayUseTheLedger) {
  auto* object = new Object;
  object->on_death = [] {
    Scope inside("inside a deleter");
    auto lease = lease_new(32, OwnerKind::workspace, current_scope());
    EXPECT_EQ(ledger().totals().all.leases, 1);
  };
  Lease(object, 16, 0, some_owner(OwnerKind::user), ScopeId::process).release();
  EXPECT_EQ(ledger().totals().all.leases, 0);
}

class OpenGate final : public Fence::Point {
 public:
  bool ready() const override { return open.load(); }
  void wait_on_host() const override {}
  void wait_on(const c10::Stream& /*stream*/) const override {}
  std::atomic<bool> open{false};
};

TEST(Concurrency, AFencedReleaseWaitsForItsFence) {
  const auto alive_before = Object::alive.load();
  const auto gate = std::make_shared<OpenGate>();
  {
    Scope scope("copy", OnClose::raise);
    auto lease = lease_new(512, OwnerKind::host_copy, current_scope());
    lease.release(Fence(gate));
    EXPECT_FALSE(lease.held());
    EXPECT_TRUE(scope.close().empty()) << "the scope is done with it";
  }
  EXPECT_EQ(ledger().totals().all.bytes, 512) << "the device is not";
  EXPECT_EQ(Object::alive.load(), alive_before + 1);
  gate->open.store(true);
  EXPECT_EQ(ledger().totals().all.bytes, 0);
  EXPECT_EQ(Object::alive.load(), alive_before);
}

// A child must neither touch what it inherited nor be confused by locks its parent's threads hold.
TEST(Concurrency, AForkedChildForgetsItsParentsLeases) {
  Scope scope("step", 3, OnClose::raise);
  auto lease = lease_new(100, OwnerKind::user, current_scope());
  const std::jthread busy([](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      lease_new(8, OwnerKind::workspace, ScopeId::process).release();
    }
  });
  for (int i = 0; i < 20; ++i) {
    const auto child = fork();
    if (child == 0) {
      alarm(20);
      bool right = ledger().totals().all.leases == 0;
      right = right && !lease.held() && !lease.release();
      right = right && current_scope() == ScopeId::process;
      right = right && scope.close().empty();
      {
        Scope own("own");
        auto fresh = lease_new(5, OwnerKind::user, current_scope());
        right = right && ledger().totals().all.bytes == 5;
      }
      right = right && ledger().totals().all.leases == 0;
      _exit(right ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << "the child was killed or hung";
    ASSERT_EQ(WEXITSTATUS(status), 0);
  }
  EXPECT_TRUE(lease.held());
  lease.release();
  EXPECT_TRUE(scope.close().empty());
}

}  // namespace
}  // namespace tenure
