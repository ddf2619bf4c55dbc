// Forked children that have mapped what their parent had.
#include <tenure/store/heirs.h>

#include "served.h"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <utility>

namespace tenure::store {
namespace {

// A fork that does `first`, says so, and ends when it is told to.
class Child {
 public:
  explicit Child(const std::function<void()>& first = [] {}) {
    int told[2];
    int done[2];
    EXPECT_EQ(::pipe(told), 0);
    EXPECT_EQ(::pipe(done), 0);
    process_ = ::fork();
    char byte = 0;
    if (process_ == 0) {
      ::close(told[1]);
      ::close(done[0]);
      first();
      static_cast<void>(::write(done[1], &byte, 1));
      static_cast<void>(::read(told[0], &byte, 1));
      ::_exit(0);
    }
    ::close(told[0]);
    ::close(done[1]);
    leash_ = told[1];
    EXPECT_EQ(::read(done[0], &byte, 1), 1);
    ::close(done[0]);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  Child(Child&&) = delete;
  Child& operator=(Child&&) = delete;
  ~Child() { end(); }

  void end() {
    if (leash_ >= 0) {
      ::close(std::exchange(leash_, -1));
      ::waitpid(process_, nullptr, 0);
    }
  }

 private:
  pid_t process_ = -1;
  int leash_ = -1;
};

class HeirsOf : public testing::Test {
 protected:
  // What one process fetched and holds, and its owner has freed.
  std::unique_ptr<Gotten> hold() {
    const Handle handle = owner.put(1 << 20);
    auto gotten = std::make_unique<Gotten>(get(client, {want(handle)}));
    owner.objects.free(handle.id, kController);
    return gotten;
  }
  // When all is told that was to be told before this.
  uint64_t still_mapped() {
    auto mark = hold();
    const auto with = owner.objects.still_mapped();
    mark.reset();
    EXPECT_TRUE(eventually([&] { return counted() + 1 == with.at(0).objects; }));
    return counted();
  }
  uint64_t counted() {
    const auto mapped = owner.objects.still_mapped();
    return mapped.empty() ? 0 : mapped[0].objects;
  }

  Served owner;
  Client client{client_options()};
};

TEST_F(HeirsOf, WhatAChildHasMappedIsCountedUntilItEnds) {
  auto held = hold();
  auto other = hold();
  Child child;
  held.reset();
  EXPECT_EQ(still_mapped(), 2U);
  child.end();
  EXPECT_TRUE(eventually([&] { return counted() == 1; }));
  other.reset();
  EXPECT_TRUE(eventually([&] { return counted() == 0; }));
}

TEST_F(HeirsOf, AChildThatLetGoIsNotWaitedFor) {
  auto held = hold();
  const Child child([&] { held.reset(); });
  EXPECT_EQ(still_mapped(), 1U);
  held.reset();
  EXPECT_TRUE(eventually([&] { return counted() == 0; }));
}

TEST_F(HeirsOf, AChildOfAChildIsOneToo) {
  auto held = hold();
  std::unique_ptr<Child> childs;
  Child child([&] {
    childs = std::make_unique<Child>();
    held.reset();
  });
  held.reset();
  EXPECT_EQ(still_mapped(), 1U);
  child.end();  // and with it the leash of its own
  EXPECT_TRUE(eventually([&] { return counted() == 0; }));
}

TEST_F(HeirsOf, WhatIsMappedAfterTheForkIsNotTheChilds) {
  auto before = hold();
  const Child child;
  auto after = hold();
  after.reset();
  EXPECT_TRUE(eventually([&] { return counted() == 1; }));
}

TEST_F(HeirsOf, AnotherProgramHasNothingMapped) {
  auto held = hold();
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t process = ::fork();
  if (process == 0) {
    ::dup2(ends[0], 0);
    ::close(ends[1]);
    ::execlp("cat", "cat", nullptr);
    ::_exit(1);
  }
  held.reset();
  EXPECT_TRUE(eventually([&] { return counted() == 0; }));
  ::close(ends[0]);
  ::close(ends[1]);
  ::waitpid(process, nullptr, 0);
}

}  // namespace
}  // namespace tenure::store
