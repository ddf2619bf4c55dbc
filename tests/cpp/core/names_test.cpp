#include <tenure/core/names.h>

#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace tenure {
namespace {

std::string refusal(std::string_view name) {
  try {
    check_name(name, "scope name");
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

bool valid_utf8(std::string_view text) {
  size_t following = 0;
  for (const unsigned char c : text) {
    if (following > 0) {
      if ((c & 0xc0) != 0x80) {
        return false;
      }
      --following;
    } else {
      following = c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : c >= 0xc0 ? 1 : 0;
    }
  }
  return following == 0;
}

TEST(Names, WhateverEndsALineIsRefused) {
  for (const auto* end : {"\n", "\r", "\x7f", "\xc2\x85", "\xe2\x80\xa8", "\xe2\x80\xa9"}) {
    for (const auto& name : {std::string(end), std::string("a") + end, end + std::string("b")}) {
      EXPECT_NE(refusal(name).find("newline"), std::string::npos) << name;
    }
  }
  EXPECT_EQ(refusal("\u00a0 \u00e9 \u2014 \u2027 \u202f"), "");
}

TEST(Names, ARefusalIsOneLine) {
  EXPECT_EQ(refusal("a\n" + std::string(10'000, 'x')).find('\n'), std::string::npos);
}

TEST(Names, EqualNamesHaveEqualIds) {
  EXPECT_EQ(intern("layers.3"), intern(std::string("layers.") + "3"));
  EXPECT_NE(intern("layers.3"), intern("layers.4"));
}

TEST(Names, ANameComesBackAsItWas) {
  const auto id = intern("Schicht – 層");
  for (int i = 0; i < 10'000; ++i) {
    intern("other " + std::to_string(i));
  }
  EXPECT_EQ(name_of(id), "Schicht – 層");
}

TEST(Names, NoneIsEmpty) {
  EXPECT_EQ(name_of(NameId::none), "");
  EXPECT_EQ(intern(""), NameId::none);
}

TEST(Names, ThreadsThatInternTheSameNamesAgree) {
  constexpr int kNames = 1000;
  std::vector<std::vector<NameId>> seen(8);
  {
    std::vector<std::jthread> threads;
    for (auto& mine : seen) {
      threads.emplace_back([&mine] {
        for (int i = 0; i < kNames; ++i) {
          mine.push_back(intern("shared " + std::to_string(i)));
        }
      });
    }
  }
  for (const auto& mine : seen) {
    EXPECT_EQ(mine, seen[0]);
  }
}

TEST(Names, TheLongestNameIsAccepted) {
  EXPECT_EQ(refusal(std::string(kLongestName, 'x')), "");
  EXPECT_EQ(refusal("naïve 模型"), "");
}

TEST(Names, ABadNameIsRefusedAndSaysWhatItIsFor) {
  EXPECT_NE(refusal("").find("scope name is empty"), std::string::npos);
  EXPECT_NE(refusal("a\nb").find("scope name contains a newline"), std::string::npos);
  EXPECT_NE(refusal(std::string("a\0b", 3)).find("control character"), std::string::npos);
  EXPECT_NE(refusal("a\x7f").find("control character"), std::string::npos);
  EXPECT_NE(refusal(std::string(kLongestName + 1, 'x')).find("has 257 bytes: use at most 256"),
            std::string::npos);
}

// Python refuses an error text that is not UTF-8, and with it the error.
TEST(Names, ARefusalIsUtf8WhereverTheNameIsCut) {
  for (const auto* character : {"é", "層", "🚶"}) {
    for (size_t shift = 0; shift < 4; ++shift) {
      std::string name(shift, 'x');
      while (name.size() <= kLongestName) {
        name += character;
      }
      EXPECT_TRUE(valid_utf8(refusal(name))) << refusal(name);
    }
  }
}

}  // namespace
}  // namespace tenure
