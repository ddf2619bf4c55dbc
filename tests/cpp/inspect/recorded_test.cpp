#include <tenure/inspect/recorded.h>

#include <tenure/config.h>
#include <tenure/core/error.h>
#include <tenure/inspect/recording.h>

#include <gtest/gtest.h>

#if TENURE_HAVE_SQLITE

#include <unistd.h>

#include <cstdio>
#include <string>

namespace tenure::inspect {
namespace {

class RecordedTest : public testing::Test {
 protected:
  void SetUp() override {
    folder = testing::TempDir() + "tenure-XXXXXX";
    EXPECT_NE(::mkdtemp(folder.data()), nullptr);
    path = folder + "/50% #1?.sqlite";
  }
  void TearDown() override {
    ::unlink(path.c_str());
    ::rmdir(folder.c_str());
  }
  std::string folder, path;
};

TEST_F(RecordedTest, RowsAndCutsAreReadBackInOrder) {
  {
    Recording writes(path, uint64_t{1} << 40);
    writes.begin();
    for (const uint64_t step : {7U, 3U}) {
      StepRow row;
      row.step = step;
      row.seconds = 1.5;
      row.rss = 60;
      row.device_allocated = 120;
      writes.add(row);
      writes.add(
          Cut{.step = step, .origin = OriginId{5}, .bytes = 9, .count = 4, .birth_steps = 2});
    }
    writes.commit();
  }
  const auto [rows, cuts] = read_recording(path);
  ASSERT_EQ(rows.size(), 2);
  EXPECT_EQ(rows[0].step, 3);
  EXPECT_EQ(rows[1].step, 7);
  EXPECT_EQ(rows[1].seconds, 1.5);
  EXPECT_EQ(rows[1].rss, 60);
  EXPECT_EQ(rows[1].device_allocated, 120);
  EXPECT_FALSE(rows[1].pss.has_value());
  ASSERT_EQ(cuts.at(OriginId{5}).size(), 2);
  EXPECT_EQ(cuts.at(OriginId{5})[1].step, 7);
  EXPECT_EQ(cuts.at(OriginId{5})[1].birth_steps, 2);
}

TEST_F(RecordedTest, WhatIsNoneIsRefused) {
  EXPECT_THROW(read_recording(path), Error);
  auto* file = std::fopen(path.c_str(), "w");
  ASSERT_NE(file, nullptr);
  std::fputs("hello", file);
  std::fclose(file);
  EXPECT_THROW(read_recording(path), Error);
}

}  // namespace
}  // namespace tenure::inspect

#endif
