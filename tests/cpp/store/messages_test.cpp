#include <tenure/store/messages.h>

#include "mutations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace tenure::store {
namespace {

const Member kSpeaker{.role = "trainer", .rank = 3, .incarnation = 0x1122334455667788};
const Member kLargest{.role = std::string(64, 'r'), .rank = INT32_MAX, .incarnation = UINT64_MAX};
const ScopeName kStep{.kind = "step", .id = "168"};
const ScopeName kLongScope{.kind = std::string(64, 'k'), .id = std::string(128, 'i')};

struct Sample {
  std::string name;
  MessageKind kind{};
  Bytes body;
  // Decodes and encodes again; throws InputError.
  Bytes (*again)(std::span<const std::byte>) = nullptr;
};

template <auto kDecode>
Bytes again(std::span<const std::byte> body) {
  return encode(kDecode(body));
}

ObjectFound found() {
  return {.wish = 7,
          .layout = {.dtype = Dtype::bfloat16, .shape = {4, 8}},
          .offset = 64,
          .bytes = 64,
          .whole_bytes = 128};
}

ObjectFound largest_found() {
  return {.wish = kMostWishes - 1,
          .layout = {.dtype = Dtype::uint8,
                     .shape =
                         [] {
                           std::vector<int64_t> shape(64, 1);
                           shape.front() = int64_t{1} << 62;
                           return shape;
                         }()},
          .offset = 0,
          .bytes = kMostObjectBytes,
          .whole_bytes = kMostObjectBytes};
}

std::vector<Sample> samples() {
  using enum MessageKind;
  return {
      {"introduce", introduce,
       encode(Introduce{.job = "rollouts", .member = kSpeaker, .purpose = Purpose::notices}),
       again<decode_introduce>},
      {"introduce_largest", introduce,
       encode(Introduce{.job = std::string(128, 'j'), .member = kLargest}),
       again<decode_introduce>},
      {"welcome", welcome, encode(Welcome{.owner = kSpeaker, .lease_ms = UINT32_MAX}),
       again<decode_welcome>},
      {"fetch_none", fetch, encode(Fetch{}), again<decode_fetch>},
      {"fetch", fetch,
       encode(Fetch{.wishes = {{.id = {.slot = 1, .generation = 2}, .rows = {}, .copied = true},
                               {.id = {.slot = UINT32_MAX, .generation = UINT32_MAX},
                                .rows = {.first = 3, .count = 4},
                                .copied = false}}}),
       again<decode_fetch>},
      {"object", object, encode(found()), again<decode_object>},
      {"object_largest", object, encode(largest_found()), again<decode_object>},
      {"refusal", refusal,
       encode(Refusal{.wish = 1, .kind = RefusalKind::stale, .why = "it was\tfreed\nbefore"}),
       again<decode_refusal>},
      {"free", free,
       encode(Ids{.ids = {{.slot = 1, .generation = 2}, {.slot = 3, .generation = 4}}}),
       again<decode_ids>},
      {"fetched_none", fetched, encode(Ids{}), again<decode_ids>},
      {"withdrawn", withdrawn, encode(Ids{.ids = {{.slot = 1, .generation = 2}}}),
       again<decode_ids>},
      {"close", close, encode(Close{.scope = kStep}), again<decode_close>},
      {"close_largest", close, encode(Close{.scope = kLongScope}), again<decode_close>},
      {"freed", freed, encode(FreedAnswer{.count = UINT64_MAX}), again<decode_freed>},
      {"closed", closed,
       encode(ClosedAnswer{.freed = 3,
                           .bytes = UINT64_MAX,
                           .difference = "train.py:41",
                           .still_mapped = {"trainer 3", ""}}),
       again<decode_closed>},
      {"ask", ask, encode(Ask{.question = Question::list, .from = UINT32_MAX, .most = 0}),
       again<decode_ask>},
      {"text", text, encode(TextAnswer{.json = R"({"name": "ü"})", .next = 17}),
       again<decode_text>},
      {"same", same, encode(Same{.id = {.slot = 1, .generation = 2}, .fingerprint = {}}),
       again<decode_same>},
      {"scope_closed", scope_closed,
       encode(ScopeClosed{.scope = kStep, .by = kSpeaker, .at_ms = INT64_MIN}),
       again<decode_scope_closed>},
      {"scope_closed_largest", scope_closed,
       encode(ScopeClosed{.scope = kLongScope, .by = kLargest, .at_ms = INT64_MAX}),
       again<decode_scope_closed>},
  };
}

class Body : public testing::TestWithParam<Sample> {};

TEST_P(Body, IsWrittenAsItWasRead) {
  EXPECT_EQ(GetParam().again(GetParam().body), GetParam().body);
}

TEST_P(Body, FitsItsKind) { EXPECT_LE(GetParam().body.size(), most_body_bytes(GetParam().kind)); }

TEST_P(Body, ThatIsCutIsRefused) { expect_no_prefix(GetParam().body, GetParam().again); }

TEST_P(Body, HasOneSpelling) {
  expect_one_spelling(GetParam().body, GetParam().again, [](const Bytes& same) { return same; });
}

INSTANTIATE_TEST_SUITE_P(Messages, Body, testing::ValuesIn(samples()),
                         [](const auto& sample) { return sample.param.name; });

TEST(Messages, AnIntroductionComesBack) {
  const auto back = decode_introduce(
      encode(Introduce{.job = "rollouts", .member = kSpeaker, .purpose = Purpose::notices}));
  EXPECT_EQ(back.job, "rollouts");
  EXPECT_EQ(back.member, kSpeaker);
  EXPECT_EQ(back.purpose, Purpose::notices);
}

TEST(Messages, AWelcomeComesBack) {
  const auto back = decode_welcome(encode(Welcome{.owner = kLargest, .lease_ms = 30'000}));
  EXPECT_EQ(back.owner, kLargest);
  EXPECT_EQ(back.lease_ms, 30'000);
}

TEST(Messages, WishesComeBackInOrder) {
  Fetch message;
  for (uint32_t i = 0; i < kMostWishes; ++i) {
    message.wishes.push_back({.id = {.slot = i, .generation = ~i},
                              .rows = {.first = i, .count = i % 2 == 0 ? kAllRows : 5},
                              .copied = i % 3 == 0});
  }
  const auto body = encode(message);
  EXPECT_LE(body.size(), most_body_bytes(MessageKind::fetch));
  const auto back = decode_fetch(body);
  ASSERT_EQ(back.wishes.size(), kMostWishes);
  for (uint32_t i = 0; i < kMostWishes; ++i) {
    ASSERT_EQ(back.wishes[i].id, message.wishes[i].id);
    ASSERT_EQ(back.wishes[i].rows, message.wishes[i].rows);
    ASSERT_EQ(back.wishes[i].copied, message.wishes[i].copied);
  }
}

TEST(Messages, MoreWishesThanFitAreNotSent) {
  EXPECT_THROW(encode(Fetch{.wishes = std::vector<Wish>(kMostWishes + 1)}), InputError);
  EXPECT_THROW(encode(Ids{.ids = std::vector<ObjectId>(kMostWishes + 1)}), InputError);
}

TEST(Messages, IdsComeBackInOrder) {
  Ids message;
  for (uint32_t i = 0; i < kMostWishes; ++i) {
    message.ids.push_back({.slot = i, .generation = ~i});
  }
  const auto body = encode(message);
  EXPECT_LE(body.size(), most_body_bytes(MessageKind::free));
  EXPECT_EQ(decode_ids(body).ids, message.ids);
}

TEST(Messages, AnObjectComesBack) {
  const auto back = decode_object(encode(found()));
  EXPECT_EQ(back.wish, 7);
  EXPECT_EQ(back.layout, found().layout);
  EXPECT_EQ(back.offset, 64);
  EXPECT_EQ(back.bytes, 64);
  EXPECT_EQ(back.whole_bytes, 128);
}

TEST(Messages, AnObjectWhoseNumbersContradictEachOtherIsNotSent) {
  const auto cannot = [](auto change) {
    ObjectFound changed = found();
    change(changed);
    try {
      encode(changed);
      return false;
    } catch (const InputError&) {
      return true;
    }
  };
  EXPECT_TRUE(cannot([](ObjectFound& o) { o.bytes = 63; }));
  EXPECT_TRUE(cannot([](ObjectFound& o) { o.offset = 65; }));
  EXPECT_TRUE(cannot([](ObjectFound& o) { o.offset = UINT64_MAX; }));
  EXPECT_TRUE(cannot([](ObjectFound& o) { o.whole_bytes = 63; }));
  EXPECT_TRUE(cannot([](ObjectFound& o) { o.whole_bytes = UINT64_MAX; }));
  EXPECT_TRUE(cannot([](ObjectFound& o) { o.wish = kMostWishes; }));
}

TEST(Messages, ARefusalIsCutToItsLimit) {
  const auto body = encode(Refusal{.wish = 1, .why = std::string(100'000, 'w')});
  EXPECT_LE(body.size(), most_body_bytes(MessageKind::refusal));
  EXPECT_EQ(decode_refusal(body).why.size(), kMostWhyBytes);
}

TEST(Messages, ARefusalComesBack) {
  const auto back = decode_refusal(
      encode(Refusal{.wish = 9, .kind = RefusalKind::budget, .why = "no \xff room"}));
  EXPECT_EQ(back.wish, 9);
  EXPECT_EQ(back.kind, RefusalKind::budget);
  EXPECT_EQ(back.why, "no ? room");
}

TEST(Messages, AnAccountOfAnySizeFits) {
  ClosedAnswer message{
      .freed = 1, .bytes = 2, .difference = std::string(1 << 20, 'd'), .still_mapped = {}};
  message.still_mapped.assign(10'000, std::string(1000, 'm'));
  const auto body = encode(message);
  EXPECT_LE(body.size(), most_body_bytes(MessageKind::closed));
  const auto back = decode_closed(body);
  EXPECT_EQ(back.freed, 1);
  EXPECT_EQ(back.bytes, 2);
  ASSERT_EQ(back.still_mapped.size(), 4096);
  EXPECT_EQ(back.still_mapped.front(), std::string(512, 'm'));
  EXPECT_EQ(back.still_mapped.back(), "and 5905 more");
}

TEST(Messages, AnAnswerAsLargeAsABodyFitsAndALargerOneIsNotSent) {
  const std::string json(kMostBodyBytes - 8, 'j');
  const auto body = encode(TextAnswer{.json = json, .next = 5});
  EXPECT_EQ(body.size(), most_body_bytes(MessageKind::text));
  EXPECT_EQ(decode_text(body).json, json);
  EXPECT_EQ(decode_text(body).next, 5);
  EXPECT_THROW(encode(TextAnswer{.json = json + 'j'}), InputError);
}

TEST(Messages, AQuestionComesBack) {
  const auto back = decode_ask(encode(Ask{.question = Question::list, .from = 5, .most = 6}));
  EXPECT_EQ(back.question, Question::list);
  EXPECT_EQ(back.from, 5);
  EXPECT_EQ(back.most, 6);
}

TEST(Messages, AComparisonComesBack) {
  Same message{.id = {.slot = 1, .generation = 2}};
  message.fingerprint.back() = std::byte{9};
  const auto back = decode_same(encode(message));
  EXPECT_EQ(back.id, message.id);
  EXPECT_EQ(back.fingerprint, message.fingerprint);
}

TEST(Messages, ANoticeOfAClosedScopeComesBack) {
  const auto back =
      decode_scope_closed(encode(ScopeClosed{.scope = kStep, .by = kSpeaker, .at_ms = -5}));
  EXPECT_EQ(back.scope, kStep);
  EXPECT_EQ(back.by, kSpeaker);
  EXPECT_EQ(back.at_ms, -5);
}

TEST(Messages, AHugeCountIsRefusedByItsLimitAndNotTried) {
  const Bytes huge(4, std::byte{0xff});
  const auto why = [&](auto decode) {
    try {
      decode(huge);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string("taken");
  };
  EXPECT_EQ(
      why(decode_fetch),
      "a fetch cannot be read: it says that it has 4294967295 items, and at most 65536 belong "
      "there");
  EXPECT_EQ(why(decode_ids),
            "a list of objects cannot be read: it says that it has 4294967295 items, and at most "
            "65536 belong there");
}

TEST(Messages, NamesThatAreNoneAreNotSent) {
  EXPECT_THROW(encode(Introduce{.job = "", .member = kSpeaker}), InputError);
  EXPECT_THROW(encode(Introduce{.job = "j", .member = {}}), InputError);
  EXPECT_THROW(encode(Close{.scope = {.kind = "a\nb", .id = ""}}), InputError);
}

// --- headers ---------------------------------------------------------------------------------

std::vector<MessageKind> kinds() {
  using enum MessageKind;
  return {introduce, fetch,  free,    close, ask,   same,   fetched, unmapped,     renew,
          welcome,   object, refusal, done,  freed, closed, text,    scope_closed, withdrawn};
}

std::optional<Header> header_of(const Bytes& bytes) {
  return decode_header(std::span<const std::byte, kHeaderBytes>(bytes));
}

Bytes bytes_of_header(const Header& header) {
  const auto bytes = encode(header);
  return {bytes.begin(), bytes.end()};
}

TEST(Header, EveryKindComesBackAtItsLimit) {
  for (const MessageKind kind : kinds()) {
    const uint64_t payload = kind == MessageKind::object ? kMostObjectBytes : 0;
    const auto back = header_of(bytes_of_header(
        {.kind = kind, .body_bytes = most_body_bytes(kind), .payload_bytes = payload}));
    ASSERT_TRUE(back) << static_cast<int>(kind);
    EXPECT_EQ(back->kind, kind);
    EXPECT_EQ(back->body_bytes, most_body_bytes(kind));
    EXPECT_EQ(back->payload_bytes, payload);
  }
}

// docs/store-protocol.md shows these bytes.
TEST(Header, AFrameIsWrittenAsItAlwaysWas) {
  const auto body = encode(Close{.scope = kStep});
  auto frame = bytes_of_header(
      {.kind = MessageKind::close, .body_bytes = static_cast<uint32_t>(body.size())});
  frame.insert(frame.end(), body.begin(), body.end());
  const std::vector<uint8_t> shown{0x74, 0x65, 0x6e, 0x73, 0x04, 0,    0,    0, 0x0b, 0,    0,   0,
                                   0,    0,    0,    0,    0,    0,    0,    0, 0,    0,    0,   0,
                                   0x04, 0,    0x73, 0x74, 0x65, 0x70, 0x03, 0, 0x31, 0x36, 0x38};
  EXPECT_TRUE(std::ranges::equal(frame, std::as_bytes(std::span(shown))));
}

TEST(Header, NoLimitExceedsThatOfAllBodies) {
  for (const MessageKind kind : kinds()) {
    EXPECT_LE(most_body_bytes(kind), kMostBodyBytes);
    EXPECT_THROW(encode(Header{.kind = kind, .body_bytes = most_body_bytes(kind) + 1}), InputError);
  }
}

TEST(Header, OnlyAnObjectHasAPayload) {
  for (const MessageKind kind : kinds()) {
    if (kind != MessageKind::object) {
      EXPECT_THROW(encode(Header{.kind = kind, .payload_bytes = 1}), InputError);
    }
  }
}

TEST(Header, HasOneSpelling) {
  const Bytes whole =
      bytes_of_header({.kind = MessageKind::object, .body_bytes = 100, .payload_bytes = 1 << 20});
  size_t taken = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int flip = 1; flip < 256; ++flip) {
      Bytes changed = whole;
      changed[at] ^= static_cast<std::byte>(flip);
      if (const auto header = header_of(changed)) {
        ASSERT_EQ(bytes_of_header(*header), changed) << "byte " << at << " changed by " << flip;
        ++taken;
      }
    }
  }
  EXPECT_GT(taken, 0);
}

TEST(Header, UnknownKindsAreRefused) {
  Bytes bytes = bytes_of_header({.kind = MessageKind::renew});
  for (int number = 0; number < 256; ++number) {
    bytes[4] = static_cast<std::byte>(number);
    const bool known = std::ranges::count(kinds(), static_cast<MessageKind>(number)) > 0;
    EXPECT_EQ(header_of(bytes).has_value(), known) << number;
  }
}

TEST(Header, AHugeLengthIsRefused) {
  Bytes bytes = bytes_of_header({.kind = MessageKind::object, .body_bytes = 1});
  Bytes body = bytes;
  std::fill_n(body.begin() + 8, 4, std::byte{0xff});
  EXPECT_FALSE(header_of(body));
  std::fill_n(bytes.begin() + 16, 8, std::byte{0xff});
  EXPECT_FALSE(header_of(bytes));
}

}  // namespace
}  // namespace tenure::store
