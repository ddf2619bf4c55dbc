#include <tenure/pipeline/header.h>

#include "says.h"
#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace tenure::pipeline {
namespace {

using enum Header::Status;

Spec spec(c10::ScalarType type, Spec::Gradient gradient, c10::SmallVector<int64_t, 5> sizes) {
  return {.type = type, .gradient = gradient, .sizes = std::move(sizes)};
}

const std::vector<Spec> kSpecs{
    spec(c10::ScalarType::Float, Spec::Gradient::wanted, {8, 128, 4096}),
    spec(c10::ScalarType::Undefined, Spec::Gradient::none, {}),
    spec(c10::ScalarType::BFloat16, Spec::Gradient::none, {0}),
    spec(c10::ScalarType::Long, Spec::Gradient::none, {}),
    spec(c10::ScalarType::ComplexDouble, Spec::Gradient::wanted,
         {1, 2, 3, 4, 5, 6, std::numeric_limits<int64_t>::max()}),
};

TEST(Header, SaysWhatTensorsThereAre) {
  const Header header(Header::of(7, changed, kSpecs));
  EXPECT_EQ(header.step(), 7);
  EXPECT_EQ(header.status(), changed);
  EXPECT_EQ(header.specs(), kSpecs);
}

TEST(Header, MaySayThatThereAreNone) {
  const Header header(Header::of(0, as_before, {}));
  EXPECT_EQ(header.status(), as_before);
  EXPECT_TRUE(header.specs().empty());
}

TEST(Header, ItsFrontSaysStepAndStatus) {
  const auto front_of = [](const Header::Words& words) {
    return Header::of_front(reinterpret_cast<const std::byte*>(words.data()));
  };
  const auto changes = front_of(Header::of(7, changed, kSpecs));
  EXPECT_EQ(changes.step(), 7);
  EXPECT_EQ(changes.status(), changed);
  EXPECT_TRUE(changes.specs().empty());
  const auto fails = front_of(Header::of(8, Failure{}));
  EXPECT_EQ(fails.step(), 8);
  EXPECT_EQ(fails.status(), Header::Status::failed);
  EXPECT_THROW(front_of({}), CollectiveError);
}

TEST(Header, ItsFrontSaysWhatAMicrobatchIsOfItsBatch) {
  const Share share{.rows = 3, .of = (1 << 28) - 1};
  const auto words = Header::of(7, as_before, kSpecs, share);
  EXPECT_EQ(Header(words).share(), share);
  EXPECT_EQ(Header(words).status(), as_before);
  EXPECT_EQ(Header::of_front(reinterpret_cast<const std::byte*>(words.data())).share(), share);
  EXPECT_EQ(Header(Header::of(7, changed, kSpecs)).share(), Share{});
  EXPECT_THROW(Header::of(7, as_before, {}, {.rows = 1, .of = 1 << 28}), InputError);
}

TEST(Header, StepsAreCountedIn64Bits) {
  const auto last = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(Header(Header::of(last, as_before, {})).step(), last);
}

TEST(Header, EveryDtypeIsItselfAgain) {
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<c10::ScalarType>(i);
    const std::vector<Spec> one{spec(type, Spec::Gradient::wanted, {2})};
    EXPECT_EQ(Header(Header::of(1, changed, one)).specs(), one) << c10::toString(type);
  }
}

// What it says of so many tensors of these dimensions; empty if they fit.
std::string refusal(size_t tensors, size_t dimensions) {
  auto one = spec(c10::ScalarType::Float, Spec::Gradient::none, {});
  for (size_t i = 0; i < dimensions; ++i) {
    one.sizes.push_back(1);
  }
  const std::vector<Spec> specs(tensors, one);
  try {
    EXPECT_EQ(Header(Header::of(1, changed, specs)).specs(), specs);
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

TEST(Header, TakesTwentyTensorsOfFourDimensions) {
  EXPECT_EQ(refusal(20, 4), "");
  EXPECT_TRUE(says(refusal(21, 4), "21 tensors"));
}

TEST(Header, TakesSixtyTwoTensorsOfNoDimension) {
  EXPECT_EQ(refusal(62, 0), "");
  EXPECT_TRUE(says(refusal(63, 0), "63 tensors"));
}

TEST(Header, RefusesOneTensorOfTooManyDimensions) {
  EXPECT_EQ(refusal(1, 122), "");
  EXPECT_TRUE(says(refusal(1, 123), "join"));
}

TEST(Header, CarriesAFailure) {
  const Failure failure{.rank = 3,
                        .before_actions = false,
                        .action = {.stage = 4, .microbatch = 9, .kind = Kind::input_backward},
                        .text = "ValueError: größer"};
  const Header header(Header::of(12, failure));
  EXPECT_EQ(header.status(), failed);
  EXPECT_EQ(header.step(), 12);
  EXPECT_EQ(header.failure().words(),
            "rank 3 failed in the input backward of stage 4 for microbatch 9: ValueError: größer");
  EXPECT_TRUE(header.specs().empty());
}

TEST(Header, CarriesAFailureBeforeTheFirstAction) {
  const Failure failure{.rank = 1, .before_actions = true, .action = {}, .text = "no rows"};
  EXPECT_EQ(Header(Header::of(1, failure)).failure().words(),
            "rank 1 failed at the begin of the step: no rows");
}

TEST(Header, AFailureMayHaveNoText) {
  EXPECT_EQ(Header(Header::of(1, Failure{})).failure().text, "");
}

std::string carried(const std::string& said) {
  return Header(
             Header::of(1, Failure{.rank = 0, .before_actions = false, .action = {}, .text = said}))
      .failure()
      .text;
}

TEST(Header, ALongTextIsCarriedByItsFront) {
  const std::string said(5000, 'x');
  const auto got = carried(said);
  EXPECT_GE(got.size(), 900);
  EXPECT_TRUE(said.starts_with(got));
}

TEST(Header, ALongTextIsCutBetweenCharacters) {
  for (size_t lead = 0; lead < 4; ++lead) {
    std::string said(lead, 'x');
    for (int i = 0; i < 400; ++i) {
      said += "🚶";
    }
    const auto got = carried(said);
    EXPECT_TRUE(said.starts_with(got));
    EXPECT_GE(got.size(), 900);
    EXPECT_EQ((got.size() - lead) % 4, 0) << "a character has 4 bytes";
  }
}

TEST(Header, TextThatJustFitsIsWhole) {
  const auto most = carried(std::string(5000, 'x')).size();
  EXPECT_EQ(carried(std::string(most - 1, 'y')), std::string(most - 1, 'y'));
  EXPECT_EQ(carried(std::string(most, 'y')), std::string(most, 'y'));
}

TEST(Header, WordsOfSomebodyElseAreRefused) {
  Header::Words words{};
  EXPECT_THROW(Header{words}, CollectiveError);
  words.fill(-1);
  EXPECT_THROW(Header{words}, CollectiveError);
  words = Header::of(1, changed, kSpecs);
  words[0] ^= 1;
  EXPECT_THROW(Header{words}, CollectiveError);
}

TEST(Header, MoreTensorsThanTheWordsHoldAreRefused) {
  auto words = Header::of(1, changed, kSpecs);
  words[3] = 1000;
  EXPECT_THROW(Header{words}, CollectiveError);
}

TEST(Header, AStatusThatThereIsNotIsRefused) {
  auto words = Header::of(1, as_before, {});
  words[2] = 99;
  EXPECT_THROW(Header{words}, CollectiveError);
}

TEST(Header, ATextLongerThanTheWordsHoldIsCut) {
  auto words = Header::of(1, Failure{.rank = 0, .before_actions = true, .action = {}, .text = "a"});
  words[8] = 1'000'000;
  EXPECT_LE(Header(words).failure().text.size(), sizeof(words));
}

TEST(Spec, TakesTheBytesOfItsElements) {
  EXPECT_EQ(spec(c10::ScalarType::Float, Spec::Gradient::none, {3, 5}).bytes(), 60);
  EXPECT_EQ(spec(c10::ScalarType::BFloat16, Spec::Gradient::none, {}).bytes(), 2);
  EXPECT_EQ(spec(c10::ScalarType::Float, Spec::Gradient::none, {3, 0}).bytes(), 0);
  EXPECT_EQ(spec(c10::ScalarType::Undefined, Spec::Gradient::none, {3}).bytes(), 0);
}

}  // namespace
}  // namespace tenure::pipeline
