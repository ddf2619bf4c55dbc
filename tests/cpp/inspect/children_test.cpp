#include <tenure/inspect/children.h>

#include <gtest/gtest.h>

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <functional>
#include <optional>
#include <thread>

namespace tenure::inspect {
namespace {

constexpr size_t kBytes = 50'000'000;
constexpr int64_t kSlack = 10'000'000;  // stacks, and pages that a sanitizer needs

// A child that does `work` and then stays until it is killed here, and its children with it.
class Child {
 public:
  explicit Child(const std::function<void()>& work) {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe(ends.data()), 0);
    process_ = ::fork();
    if (process_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      work();
      EXPECT_EQ(::write(ends[1], "x", 1), 1);
      while (true) {
        ::pause();
      }
    }
    char ready = 0;
    EXPECT_EQ(::read(ends[0], &ready, 1), 1);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~Child() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

 private:
  pid_t process_ = 0;
};

void touch(int sharing) {
  void* pages = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
  auto* bytes = static_cast<volatile char*>(pages);
  for (size_t i = 0; i < kBytes; i += 4096) {
    bytes[i] = 1;
  }
}

int64_t bytes_of_children() { return private_bytes(children_of(::getpid())); }

TEST(Children, AProcessWithoutChildrenHasNone) { EXPECT_TRUE(children_of(::getpid()).empty()); }

// More than an idle child has, which shares the heap of this process until it writes to it.
int64_t bytes_beyond_idle(const std::function<void()>& work) {
  const auto idle = [] {
    const Child child([] {});
    return bytes_of_children();
  }();
  const Child child(work);
  return bytes_of_children() - idle;
}

TEST(Children, WhatAChildTouchesIsCounted) {
  const auto bytes = bytes_beyond_idle([] { touch(MAP_PRIVATE); });
  EXPECT_NEAR(static_cast<double>(bytes), kBytes, kSlack);
}

TEST(Children, MemoryThatIsSharedIsNotCounted) {
  EXPECT_LT(bytes_beyond_idle([] { touch(MAP_SHARED); }), kSlack);
}

TEST(Children, GrandchildrenAreCounted) {
  static std::optional<Child> grandchild;
  const auto bytes = bytes_beyond_idle([] { grandchild.emplace([] { touch(MAP_PRIVATE); }); });
  EXPECT_GT(bytes, static_cast<int64_t>(kBytes) - kSlack);
}

TEST(Children, ThoseThatAnotherThreadStartedAreAmongThem) {
  static std::optional<Child> child;
  std::atomic<bool> over = false;
  std::thread thread([&] {
    child.emplace([] {});
    over.wait(false);
  });
  while (children_of(::getpid()).empty()) {
    std::this_thread::yield();
  }
  EXPECT_EQ(children_of(::getpid()).size(), 1U);
  over = true;
  over.notify_one();
  thread.join();
  EXPECT_EQ(children_of(::getpid()).size(), 1U) << "also when the thread has gone";
  child.reset();
}

TEST(Children, AChildThatEndedAndWasNotWaitedForHoldsNothing) {
  const auto process = ::fork();
  if (process == 0) {
    ::_exit(0);
  }
  siginfo_t ended{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(process), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(children_of(::getpid()), std::vector<pid_t>{process});
  EXPECT_EQ(bytes_of_children(), 0);
  ::waitpid(process, nullptr, 0);
  EXPECT_TRUE(children_of(::getpid()).empty());
}

}  // namespace
}  // namespace tenure::inspect
