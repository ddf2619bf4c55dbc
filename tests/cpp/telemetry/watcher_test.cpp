#include <tenure/telemetry/watcher.h>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>

namespace tenure::telemetry {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

class WatcherTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("watcher-" + std::to_string(getpid()) + "-" +
               testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  Watcher::Options options(uint32_t rank = 0, uint32_t ranks = 1) const {
    return {folder_ / "dump.request", "flight", rank, ranks};
  }
  void write(const std::string& text) const {
    std::ofstream(folder_ / "beside") << text;
    std::filesystem::rename(folder_ / "beside", folder_ / "dump.request");
  }

  std::filesystem::path folder_;
};

// What was heard first; fails the test if nothing was.
class Ear {
 public:
  Watcher::Heard function() {
    return [this](const std::string& text) {
      const std::lock_guard lock(mutex_);
      heard_.push_back(text);
      changed_.notify_all();
    };
  }
  std::vector<std::string> wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, 20s, [&] { return heard_.size() >= count; }));
    return heard_;
  }
  std::vector<std::string> heard() {
    const std::lock_guard lock(mutex_);
    return heard_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> heard_;
};

TEST_F(WatcherTest, RanksHearThroughTheStoreRoundAfterRound) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Ear first_ear;
  Ear second_ear;
  // Files of their own: nothing is heard but through the store.
  Watcher first(store, {folder_ / "a", "flight", 0, 2}, first_ear.function());
  Watcher second(store, {folder_ / "b", "flight", 1, 2}, second_ear.function());
  EXPECT_TRUE(first.tell("one"));
  EXPECT_EQ(second_ear.wait_for(1), std::vector<std::string>({"one"}));
  EXPECT_TRUE(first.tell("two"));
  EXPECT_EQ(second_ear.wait_for(2), std::vector<std::string>({"one", "two"}));
  EXPECT_TRUE(second.tell("three"));
  EXPECT_EQ(first_ear.wait_for(1), std::vector<std::string>({"three"}));
}

TEST_F(WatcherTest, OneOfTwoThatTellAtOnceIsFirst) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int trial = 0; trial < 20; ++trial) {
    const auto prefix = "flight" + std::to_string(trial);
    Watcher one(store, {folder_ / "a", prefix, 0, 2}, [](const std::string&) {});
    Watcher other(store, {folder_ / "b", prefix, 1, 2}, [](const std::string&) {});
    auto of_one = std::async(std::launch::async, [&] { return one.tell("one"); });
    const bool of_other = other.tell("other");
    // Who tells after having heard of it has a round of its own.
    EXPECT_TRUE(of_one.get() || of_other);
  }
}

TEST_F(WatcherTest, HearsTheFileOnce) {
  Ear ear;
  const Watcher watcher({}, options(), ear.function());
  write("asked");
  ear.wait_for(1);
  write("again");
  EXPECT_EQ(ear.wait_for(2), std::vector<std::string>({"asked", "again"}));
}

TEST_F(WatcherTest, WhatTheFileSaysAtTheStartIsOld) {
  write("old");
  Ear ear;
  const Watcher watcher({}, options(), ear.function());
  write("new");
  EXPECT_EQ(ear.wait_for(1), std::vector<std::string>({"new"}));
}

TEST_F(WatcherTest, WithoutAStoreTheFileReachesOthers) {
  Ear ear;
  Watcher one({}, options(0, 2), [](const std::string&) { ADD_FAILURE(); });
  const Watcher other({}, options(1, 2), ear.function());
  EXPECT_TRUE(one.tell("failed"));
  EXPECT_EQ(ear.wait_for(1), std::vector<std::string>({"failed"}));
}

// As of a host that is gone.
class DeadStore final : public c10d::Store {
 public:
  c10::intrusive_ptr<Store> clone() override { return c10::make_intrusive<DeadStore>(); }
  void set(const std::string&, const std::vector<uint8_t>&) override { fail(); }
  std::vector<uint8_t> compareSet(const std::string&, const std::vector<uint8_t>&,
                                  const std::vector<uint8_t>&) override {
    fail();
  }
  std::vector<uint8_t> get(const std::string&) override { fail(); }
  int64_t add(const std::string&, int64_t) override { fail(); }
  bool deleteKey(const std::string&) override { fail(); }
  bool check(const std::vector<std::string>&) override { fail(); }
  int64_t getNumKeys() override { fail(); }
  void wait(const std::vector<std::string>&) override { fail(); }
  void wait(const std::vector<std::string>&, const std::chrono::milliseconds&) override { fail(); }

 private:
  [[noreturn]] static void fail() { throw std::runtime_error("connection reset by peer"); }
};

TEST_F(WatcherTest, FilesAreTheWayWhenTheStoreIsGone) {
  const auto store = c10::make_intrusive<DeadStore>();
  Ear ear;
  Watcher one(store, options(0, 2), [](const std::string&) {});
  const Watcher other(store, options(1, 2), ear.function());
  EXPECT_TRUE(one.tell("failed"));
  EXPECT_EQ(ear.wait_for(1), std::vector<std::string>({"failed"}));
}

// As of a host that does not answer those who connect, until it is released.
class SlowStore final : public c10d::HashStore {
 public:
  c10::intrusive_ptr<Store> clone() override {
    released_.wait(false);
    return HashStore::clone();
  }
  void release() {
    released_ = true;
    released_.notify_all();
  }

 private:
  std::atomic<bool> released_ = false;
};

TEST_F(WatcherTest, FilesAreTheWayUntilTheStoreAnswersAndThenItIsToldToo) {
  const auto slow = c10::make_intrusive<SlowStore>();
  Ear ear;
  Watcher one(slow, options(0, 2), [](const std::string&) {});
  const Watcher other({}, options(1, 2), ear.function());
  EXPECT_TRUE(one.tell("failed"));
  EXPECT_EQ(ear.wait_for(1), std::vector<std::string>({"failed"}));

  write("asked");
  EXPECT_EQ(ear.wait_for(2), std::vector<std::string>({"failed", "asked"}));
  slow->release();
  const auto key = "flight/0/1";
  slow->wait({key}, 20s);
  const auto told = slow->get(key);
  EXPECT_EQ(std::string(told.begin(), told.end()), "failed");
}

TEST_F(WatcherTest, EndsSoonAndHearsNoMore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Ear ear;
  Watcher watcher(store, options(), ear.function());
  const auto began = steady_clock::now();
  watcher.close();
  EXPECT_LT(steady_clock::now() - began, 2s);
  write("late");
  EXPECT_EQ(ear.heard(), std::vector<std::string>());
}

}  // namespace
}  // namespace tenure::telemetry
