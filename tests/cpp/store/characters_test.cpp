#include <tenure/store/characters.h>

#include <gtest/gtest.h>

#include <string>

namespace tenure::store {
namespace {

using namespace std::string_view_literals;

TEST(Characters, EveryCodePointThatIsPrintedIsALine) {
  EXPECT_TRUE(is_line(""));
  EXPECT_TRUE(is_line(" ~"));
  EXPECT_TRUE(is_line("\u00a0\u00fc\u07ff"));
  EXPECT_TRUE(is_line("\u0800\ud7ff\ue000\uffff"));
  EXPECT_TRUE(is_line("\U00010000\U0010ffff"));
}

TEST(Characters, ControlsAreNoLine) {
  for (const auto control : {"\x00"sv, "\x1b"sv, "\n"sv, "\x7f"sv, "\u0080"sv, "\u009f"sv}) {
    EXPECT_FALSE(is_line(control)) << static_cast<int>(control.back());
  }
}

TEST(Characters, ProseHasNewlinesAndTabsAndNoOtherControls) {
  EXPECT_TRUE(is_prose("a\n\tb"));
  EXPECT_FALSE(is_prose("a\rb"));
  EXPECT_FALSE(is_prose("\x1b[2J"));
}

TEST(Characters, WhatIsNotUtf8IsNoText) {
  EXPECT_FALSE(is_line("\x80")) << "no first byte";
  EXPECT_FALSE(is_line("\xc3")) << "cut";
  EXPECT_FALSE(is_line("\xe2\x82")) << "cut";
  EXPECT_FALSE(is_line("\xc3(")) << "no second byte";
  EXPECT_FALSE(is_line("\xc0\xaf")) << "two bytes for one";
  EXPECT_FALSE(is_line("\xe0\x80\xaf")) << "three bytes for one";
  EXPECT_FALSE(is_line("\xf0\x82\x82\xac")) << "four bytes for three";
  EXPECT_FALSE(is_line("\xed\xa0\x80")) << "half of a pair";
  EXPECT_FALSE(is_line("\xf4\x90\x80\x80")) << "beyond the last";
  EXPECT_FALSE(is_line("\xff"));
}

TEST(Characters, WhatCannotStayBecomesAQuestionMark) {
  EXPECT_EQ(as_prose("a\x1b[31m\xff \u00fc\n", 100), "a?[31m? \u00fc\n");
}

TEST(Characters, ACutLeavesNoHalfCharacter) {
  EXPECT_EQ(as_prose("ab\u00fc", 3), "ab");
  EXPECT_EQ(as_prose("ab\u00fc", 4), "ab\u00fc");
  EXPECT_EQ(as_prose("abc", 0), "");
}

}  // namespace
}  // namespace tenure::store
