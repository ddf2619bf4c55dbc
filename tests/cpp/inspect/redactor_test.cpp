#include <tenure/inspect/redactor.h>

#include <gtest/gtest.h>

#include <string>

namespace tenure::inspect {
namespace {

const Redactor& redact() {
  static const Redactor made("key", {"local", "of", "graph", "nodes", "saved", "self", "py"});
  return made;
}

TEST(Redactor, WithoutAKeyTextsStay) {
  EXPECT_EQ(Redactor()("train.py:41 main"), "train.py:41 main");
}

TEST(Redactor, PathsAndNamesGoAndTheShapeStays) {
  const auto out = redact()("/home/me/secret-project/train.py:41 main");
  for (const auto* name : {"home", "me/", "secret", "project", "train", "main"}) {
    EXPECT_EQ(out.find(name), std::string::npos) << out;
  }
  EXPECT_NE(out.find(".py:41 x"), std::string::npos) << out;
}

TEST(Redactor, OperatorsNodesNumbersAndKnownWordsStay) {
  EXPECT_EQ(redact()("aten::_to_copy"), "aten::_to_copy");
  const auto out =
      redact()("losses (local of main) → [37] → graph (9 nodes) → MmBackward0 saved self");
  EXPECT_NE(out.find("(local of x"), std::string::npos) << out;
  EXPECT_NE(out.find(" → [37] → graph (9 nodes) → MmBackward0 saved self"), std::string::npos);
}

TEST(Redactor, OperatorsAndFunctionsOfTheProgramGo) {
  EXPECT_EQ(redact()("mylib::fused").find("fused"), std::string::npos);
  EXPECT_EQ(redact()("mylib::fused").find("mylib"), std::string::npos);
  EXPECT_EQ(redact()("SecretBackward").find("Secret"), std::string::npos);
  EXPECT_EQ(redact()("aten::mm secret").find("secret"), std::string::npos);
}

TEST(Redactor, LettersBeyondAsciiArePartOfAName) {
  const auto out = redact()("modèle_été…");
  EXPECT_EQ(out.find("mod"), std::string::npos);
  EXPECT_TRUE(out.ends_with("…")) << out;
}

TEST(Redactor, TheSameNameIsTheSameWordUnderOneKeyOnly) {
  EXPECT_EQ(redact()("loss"), Redactor("key", {})("loss"));
  EXPECT_NE(redact()("loss"), Redactor("other", {})("loss"));
  EXPECT_NE(redact()("loss"), redact()("losses"));
  EXPECT_NE(redact()("a_name_of_nine"), redact()("a_name_of_nin"));
}

}  // namespace
}  // namespace tenure::inspect
