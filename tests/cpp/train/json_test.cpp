#include <tenure/train/json.h>

#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <string>

namespace tenure::train {
namespace {

TEST(Json, ReadsEveryKindOfValue) {
  const auto json = Json::parse(
      R"( {"i": -12, "r": 1.5e-3, "b": true, "n": null, "s": "a\"\\\n\u00e9\ud83d\ude00",)"
      R"( "a": [1, [], {}]} )",
      "x");
  EXPECT_EQ(*json.find("i")->integer(), -12);
  EXPECT_DOUBLE_EQ(*json.find("r")->real(), 1.5e-3);
  EXPECT_TRUE(*json.find("b")->boolean());
  EXPECT_EQ(json.find("n"), nullptr);
  EXPECT_EQ(*json.find("s")->string(), "a\"\\\n\xC3\xA9\xF0\x9F\x98\x80");
  EXPECT_EQ(json.find("a")->array()->size(), 3U);
  EXPECT_EQ(json.find("none"), nullptr);
}

TEST(Json, TakesCharactersOfEveryLength) {
  const std::string text = "\"a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\"";
  EXPECT_EQ(Json::parse(text, "x").dump(), text);
}

TEST(Json, AnIntegerThatDoesNotFitIsReal) {
  EXPECT_DOUBLE_EQ(*Json::parse("123456789012345678901", "x").real(), 123456789012345678901.0);
}

TEST(Json, WhatIsWrittenIsReadBack) {
  const Json json(Json::Object{{"a", Json::Array{int64_t{1}, 2.0, "\x01\"é", Json(), false}},
                               {"b", Json::Object{}}});
  EXPECT_EQ(json.dump(), "{\"a\":[1,2.0,\"\\u0001\\\"é\",null,false],\"b\":{}}");
  EXPECT_EQ(Json::parse(json.dump(Json::Layout::indented), "x").dump(), json.dump());
}

class NotJson : public testing::TestWithParam<const char*> {};

TEST_P(NotJson, IsRefusedNamingTheFile) {
  try {
    Json::parse(GetParam(), "x.json");
    FAIL() << "it was read";
  } catch (const InputError& error) {
    EXPECT_EQ(std::string(error.what()).find("x.json: this is not JSON: "), 0U) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Json, NotJson,
                         testing::Values("", "{", "{\"a\":1,}", "[1,]", "[1 2]", "{'a':1}", "01",
                                         "1.", "1e", "-", "nul", "NaN", "\"a", "\"\t\"", "\"\\x\"",
                                         "\"\\u12\"", "\"\\ud800\"", "\"\\udc00\"", "{\"a\":1} x",
                                         "{\"a\":1,\"a\":2}", "{\"a\" 1}", "{1:2}", "1e999",
                                         "\"\xff\"", "\"\xc3\"", "\"\xed\xa0\x80\"", "\"\xc0\x80\"",
                                         "\"\xf5\x80\x80\x80\""));

TEST(Json, NestedBeyondReasonIsRefused) {
  EXPECT_THROW(Json::parse(std::string(100'000, '['), "x"), InputError);
}

}  // namespace
}  // namespace tenure::train
