#include <tenure/telemetry/last_word.h>

#include <tenure/core/clock.h>

#include <gtest/gtest.h>

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

namespace tenure::telemetry {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

class LastWordTest : public ::testing::Test {
 protected:
  LastWordTest()
      : folder_(fs::temp_directory_path() / ("last-word-" + std::to_string(getpid()))),
        path_(folder_ / "rank.flight.json"),
        word_(path_.string(), R"({"rank":3})") {
    fs::create_directories(folder_);
  }
  ~LastWordTest() override { fs::remove_all(folder_); }
  LastWordTest(const LastWordTest&) = delete;
  LastWordTest& operator=(const LastWordTest&) = delete;

  std::string there() const {
    std::ifstream file(path_);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  bool says(std::string_view part) const { return there().find(part) != std::string::npos; }

  const fs::path folder_, path_;
  LastWord word_;
};

TEST_F(LastWordTest, SaysWhoItIsWhatWentWrongAndWhatThereIs) {
  ASSERT_TRUE(word_.write(R"({"reason":"memory"})"));
  EXPECT_TRUE(there().starts_with(R"({"rank":3,"time":)")) << there();
  EXPECT_TRUE(says(R"("headline":{"reason":"memory"})"));
  EXPECT_TRUE(says(R"("step":)" + std::to_string(clock().now()) + ","));
  EXPECT_TRUE(says(R"("host_memory":{"rss_bytes":)"));
  EXPECT_TRUE(says(R"("ledger":{"all":{"bytes":)"));
  EXPECT_TRUE(there().ends_with("}"));
}

TEST_F(LastWordTest, ANewOneReplacesTheOldOne) {
  ASSERT_TRUE(word_.write(R"("first")"));
  ASSERT_TRUE(word_.write(R"("second")"));
  EXPECT_FALSE(says("first"));
  EXPECT_TRUE(says("second"));
}

TEST_F(LastWordTest, WhatIsToBeKeptIsKeptForAWhile) {
  ASSERT_TRUE(word_.write(R"("the fuller one")"));
  word_.keep();
  EXPECT_FALSE(word_.write(R"("at once")"));
  EXPECT_TRUE(says("the fuller one"));

  word_.keep(milliseconds(20));
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_TRUE(word_.write(R"("later")"));
  EXPECT_TRUE(says("later"));
}

TEST_F(LastWordTest, WhatTheRankSurvivedIsInAllThatComesAfter) {
  word_.remember(R"({"step":41})");
  ASSERT_TRUE(word_.write(R"("later")"));
  EXPECT_TRUE(says(R"("earlier":{"step":41}})"));
}

TEST_F(LastWordTest, WhereItCannotBeWrittenNothingIsLeft) {
  fs::create_directory(path_);  // cannot be replaced by a file
  EXPECT_FALSE(word_.write(R"("lost")"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
  fs::remove_all(folder_);
  EXPECT_FALSE(word_.write(R"("lost")"));
}

}  // namespace
}  // namespace tenure::telemetry
