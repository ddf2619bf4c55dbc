#include <tenure/core/scope.h>

#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>
#include <tenure/core/storage_ref.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <deque>
#include <latch>
#include <stdexcept>
#include <thread>
#include <vector>

namespace tenure {
namespace {

OwnerId owner() { return intern_owner(OwnerKind::user, "test"); }
Lease hold_bytes(int64_t bytes) { return hold(at::empty({bytes}, at::kByte), owner()); }
std::string path() { return ledger().scopes().path(current_scope()); }

template <class Fn>
std::string refusal(Fn&& fn) {
  try {
    fn();
  } catch (const ScopeError& error) {
    return error.what();
  }
  return "";
}

TEST(Scope, NestsAndUnwinds) {
  EXPECT_EQ(path(), "process");
  {
    const Scope epoch("epoch", 1);
    EXPECT_EQ(path(), "epoch 1");
    {
      const Scope step("step", 12);
      EXPECT_EQ(path(), "epoch 1 / step 12");
      EXPECT_EQ(current_scope(), step.id());
    }
    EXPECT_EQ(current_scope(), epoch.id());
  }
  EXPECT_EQ(path(), "process");
}

TEST(Scope, ReportMovesLeasesOutAndSaysWhatWasLeft) {
  Scope outer("outer", OnClose::release);
  Scope inner("inner", 3);
  const auto lease = hold_bytes(2048);
  const auto report = inner.close();
  EXPECT_EQ(report.leases, 1);
  EXPECT_EQ(report.bytes, 2048);
  EXPECT_EQ(
      report.text(),
      "scope 'inner 3' closed with 1 lease (2.0 KiB) still held: user 'test', 1 lease, 2.0 "
      "KiB. Release them before the scope ends, or transfer them to a scope that lasts longer");
  EXPECT_EQ(lease.row()->scope, outer.id());
}

TEST(Scope, ReleaseEndsLeases) {
  Scope scope("step", OnClose::release);
  const auto lease = hold_bytes(64);
  EXPECT_EQ(scope.close().leases, 1);
  EXPECT_FALSE(lease.held());
  EXPECT_EQ(ledger().totals().all.bytes, 0);
}

TEST(Scope, RaiseThrowsOnceItIsClosed) {
  Scope scope("step", 4, OnClose::raise);
  const auto lease = hold_bytes(64);
  EXPECT_NE(refusal([&] { scope.close(); }).find("scope 'step 4' closed with 1 lease"),
            std::string::npos);
  EXPECT_EQ(path(), "process");
  EXPECT_EQ(lease.row()->scope, ScopeId::process);
}

TEST(Scope, ADestructorPrintsWhatWasLeft) {
  Lease lease;
  testing::internal::CaptureStderr();
  {
    const Scope scope("step", 5);
    lease = hold_bytes(64);
  }
  {
    const Scope scope("step", 6, OnClose::raise);
    lease = hold_bytes(64);
  }
  const auto printed = testing::internal::GetCapturedStderr();
  EXPECT_NE(printed.find("tenure: scope 'step 5' closed with 1 lease"), std::string::npos);
  EXPECT_NE(printed.find("tenure: scope 'step 6' closed with 1 lease"), std::string::npos);
}

TEST(Scope, ADestructorOfAnEmptyScopeIsSilent) {
  testing::internal::CaptureStderr();
  {
    const Scope scope("step", OnClose::raise);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

struct Unwound {
  bool held;
  std::string printed;
};

Unwound unwind(OnClose on_close) {
  Lease lease;
  testing::internal::CaptureStderr();
  try {
    const Scope scope("step", on_close);
    lease = hold_bytes(64);
    throw std::runtime_error("inside");
  } catch (const std::runtime_error&) {
  }
  return {lease.held(), testing::internal::GetCapturedStderr()};
}

TEST(Scope, ExceptionsUnwindItSilently) {
  const auto report = unwind(OnClose::report);
  EXPECT_TRUE(report.held);
  EXPECT_EQ(report.printed, "");
  const auto release = unwind(OnClose::release);
  EXPECT_FALSE(release.held);
  EXPECT_EQ(release.printed, "");
  const auto raise = unwind(OnClose::raise);
  EXPECT_FALSE(raise.held) << "a failed step keeps nothing";
  EXPECT_EQ(raise.printed, "");
  EXPECT_EQ(path(), "process");
}

// A scope inside a destructor that runs during unwinding does not itself end because of it.
TEST(Scope, OneOpenedWhileAnExceptionUnwindsEndsNormally) {
  struct Cleanup {
    std::string& seen;
    ~Cleanup() {
      Scope scope("cleanup", OnClose::raise);
      const auto lease = hold_bytes(64);
      seen = refusal([&] { scope.close(); });
    }
  };
  std::string seen;
  try {
    const Cleanup cleanup{seen};
    throw std::runtime_error("inside");
  } catch (const std::runtime_error&) {
  }
  EXPECT_NE(seen.find("scope 'cleanup' closed with 1 lease"), std::string::npos);
}

TEST(Scope, ClosingTwiceIsRefused) {
  Scope scope("step");
  scope.close();
  EXPECT_NE(refusal([&] { scope.close(); }).find("closed already"), std::string::npos);
}

TEST(Scope, ClosingOutOfOrderIsRefusedAndChangesNothing) {
  Scope outer("outer", OnClose::release);
  Scope inner("inner", OnClose::release);
  const auto lease = hold_bytes(64);
  EXPECT_NE(refusal([&] { outer.close(); }).find("'outer' still has 1 open scope inside it"),
            std::string::npos);
  EXPECT_EQ(path(), "outer / inner");
  EXPECT_TRUE(lease.held());
  inner.close();
  outer.close();
}

TEST(Scope, ClosingOnAnotherThreadIsRefusedAndChangesNothing) {
  Scope scope("step", 7, OnClose::release);
  const auto lease = hold_bytes(64);
  std::string text;
  std::thread([&] { text = refusal([&] { scope.close(); }); }).join();
  EXPECT_NE(text.find("scope 'step 7' was opened by thread"), std::string::npos) << text;
  EXPECT_EQ(current_scope(), scope.id());
  EXPECT_TRUE(lease.held());
  EXPECT_EQ(scope.close().leases, 1);
}

TEST(Scope, OneOfAnotherThreadMovesUpWhenAnExceptionEndsTheOuterOne) {
  auto& scopes = ledger().scopes();
  const Scope job("job");
  ScopeId theirs{};
  Lease lease;
  std::latch opened(1);
  std::latch looked_at(1);
  std::thread thread;
  try {
    const Scope epoch("epoch", OnClose::release);
    thread = std::thread([&, outer = epoch.id()] {
      theirs = scopes.open({intern("theirs"), {}}, OnClose::report, outer);
      opened.count_down();
      looked_at.wait();
      close_scope(theirs, Ending::normal);
    });
    opened.wait();
    lease = hold(at::empty({64}, at::kByte), owner(), theirs);
    throw std::runtime_error("a step failed");
  } catch (const std::runtime_error&) {
    EXPECT_EQ(path(), "job");
  }
  EXPECT_EQ(scopes.path(theirs), "job / theirs");
  EXPECT_TRUE(lease.held());
  lease.release();
  looked_at.count_down();
  thread.join();
}

TEST(Scope, ThreadsStartWithoutOne) {
  const Scope scope("step");
  std::thread([] {
    EXPECT_EQ(path(), "process");
    const Scope own("own");
    EXPECT_EQ(path(), "own");
  }).join();
}

TEST(Scope, NestingHasALimitThatChangesNothing) {
  std::deque<Scope> scopes;
  for (uint32_t depth = 0; depth < kDeepestScope; ++depth) {
    scopes.emplace_back("deep");
  }
  EXPECT_NE(refusal([] { const Scope one_more("deep"); }).find("would be nested 256 deep"),
            std::string::npos);
  EXPECT_EQ(current_scope(), scopes.back().id());
  while (!scopes.empty()) {
    scopes.back().close();
    scopes.pop_back();
  }
  EXPECT_EQ(path(), "process");
}

TEST(Scope, OpenScopesHaveALimit) {
  std::vector<ScopeId> open;
  std::string text;
  while (text.empty()) {
    text = refusal([&] { open.push_back(open_scope({intern("many"), {}}, OnClose::report)); });
  }
  EXPECT_NE(text.find("more than 65536 open scopes"), std::string::npos);
  EXPECT_EQ(open.size(), kMostOpenScopes - 1) << "one is the process's";
  for (const auto id : open) {
    close_scope(id, Ending::normal);
  }
  const Scope works_again("step");
  EXPECT_EQ(path(), "step");
}

TEST(Scope, ABadNameIsRefused) {
  EXPECT_THROW(Scope(""), InputError);
  EXPECT_THROW(Scope("a\nb"), InputError);
  EXPECT_THROW(Scope(std::string(10'000, 'x')), InputError);
  EXPECT_EQ(path(), "process");
}

// On the CPU autograd runs on the thread that calls it; threads of a device are tested in
// tests/cpp/core_device.
TEST(Scope, AHookOfBackwardRunsInTheScopeOfItsCaller) {
  const auto x = at::ones({4}).requires_grad_();
  auto loss = x.mul(2).sum();
  std::string seen;
  x.register_hook([&](const at::Tensor& /*grad*/) { seen = path(); });
  const Scope scope("step", 8);
  loss.backward();
  EXPECT_EQ(seen, "step 8");
}

}  // namespace
}  // namespace tenure
