#include <tenure/core/text.h>

#include <gtest/gtest.h>

#include <limits>

namespace tenure {
namespace {

TEST(Text, BytesAreExactBelowAKibibyte) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(1023), "1023 B");
}

TEST(Text, BytesHaveOneDecimalAbove) {
  EXPECT_EQ(bytes_text(1024), "1.0 KiB");
  EXPECT_EQ(bytes_text(1536), "1.5 KiB");
  EXPECT_EQ(bytes_text(uint64_t{3} << 30), "3.0 GiB");
  EXPECT_EQ(bytes_text(std::numeric_limits<uint64_t>::max()), "16384.0 PiB");
}

TEST(Text, CountsAgreeWithTheirNoun) {
  EXPECT_EQ(count_text(0, "lease"), "0 leases");
  EXPECT_EQ(count_text(1, "lease"), "1 lease");
  EXPECT_EQ(count_text(2, "lease"), "2 leases");
}

TEST(Text, ShortNamesAreKeptWhole) {
  EXPECT_EQ(front_of("abc", 3), "abc");
  EXPECT_EQ(end_of("abc", 3), "abc");
  EXPECT_EQ(front_of("", 3), "");
  EXPECT_EQ(end_of("", 3), "");
}

TEST(Text, LongNamesAreCutBetweenCharacters) {
  EXPECT_EQ(front_of("abcdef", 2), "ab");
  EXPECT_EQ(front_of("aéé", 2), "a");  // é has two bytes
  EXPECT_EQ(front_of("aéé", 3), "aé");
  EXPECT_EQ(front_of("🚶", 3), "");
  EXPECT_EQ(end_of("abcdef", 2), "ef");
  EXPECT_EQ(end_of("ééa", 2), "a");
  EXPECT_EQ(end_of("ééa", 3), "éa");
  EXPECT_EQ(end_of("🚶", 3), "");
}

}  // namespace
}  // namespace tenure
