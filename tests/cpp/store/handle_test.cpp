#include <tenure/store/handle.h>

#include "mutations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

namespace tenure::store {
namespace {

Origin origin(int32_t rank) {
  Origin origin{.job = "rollouts",
                .owner = {.role = "trainer", .rank = rank, .incarnation = 0x1122334455667788},
                .host = {.boot = {}, .network = 4026531840, .user = 1000},
                .path = "/tmp/tenure/s.sock",
                .address = "10.0.0.7",
                .port = 41000};
  origin.host.boot.fill(std::byte{0xab});
  return origin;
}

Handle handle() {
  return {.origin = std::make_shared<Origin>(origin(3)),
          .scope = {.kind = "step", .id = "168"},
          .id = {.slot = 5, .generation = 9},
          .layout = {.dtype = Dtype::float32, .shape = {4096, 4096}},
          .unstored = {}};
}

Handle largest() {
  Origin big{.job = std::string(128, 'j'),
             .owner = {.role = std::string(64, 'r'), .rank = INT32_MAX, .incarnation = UINT64_MAX},
             .host = {.boot = {}, .network = UINT64_MAX, .user = UINT32_MAX},
             .path = '/' + std::string(106, 'p'),
             .address = std::string(253, 'a'),
             .port = UINT16_MAX};
  return {.origin = std::make_shared<Origin>(big),
          .scope = {.kind = std::string(64, 'k'), .id = std::string(128, 'i')},
          .id = {.slot = UINT32_MAX, .generation = UINT32_MAX},
          .layout = {.dtype = Dtype::complex128, .shape = std::vector<int64_t>(64, 1)},
          .unstored = std::string(512, 'u')};
}

Handle smallest() {
  Origin small{.job = "j",
               .owner = {.role = "r", .rank = 0, .incarnation = 1},
               .host = {},
               .path = "",
               .address = "",
               .port = 0};
  return {.origin = std::make_shared<Origin>(small),
          .scope = {.kind = "s", .id = ""},
          .id = {},
          .layout = {.dtype = Dtype::uint8, .shape = {}},
          .unstored = {}};
}

bool refused(const std::string& text) {
  try {
    handle_from_text(text);
    return false;
  } catch (const InputError&) {
    return true;
  }
}

TEST(Handle, BytesBringItBack) {
  for (const Handle& original : {handle(), largest(), smallest()}) {
    EXPECT_EQ(decode_handle(encode(original)), original);
  }
}

TEST(Handle, TextBringsItBack) {
  for (const Handle& original : {handle(), largest(), smallest()}) {
    const std::string text = to_text(original);
    EXPECT_TRUE(text.starts_with("tenure1:"));
    EXPECT_EQ(text.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                     "0123456789-_",
                                     8),
              std::string::npos);
    EXPECT_EQ(handle_from_text(text), original);
  }
}

// Other versions read what this one wrote; docs/store-protocol.md shows it.
TEST(Handle, IsWrittenAsItAlwaysWas) {
  Origin at = origin(3);
  at.owner.incarnation = 7;
  at.host = {};
  at.path = "/tmp/tenure/s";
  const Handle small{.origin = std::make_shared<Origin>(at),
                     .scope = {.kind = "step", .id = "168"},
                     .id = {.slot = 5, .generation = 9},
                     .layout = {.dtype = Dtype::float32, .shape = {2, 3}},
                     .unstored = {}};
  EXPECT_EQ(to_text(small),
            "tenure1:AVYACAByb2xsb3V0cwcAdHJhaW5lcgMAAAAHAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
            "AAAAANAC90bXAvdGVudXJlL3MIADEwLjAuMC43KKAEAHN0ZXADADE2OAUAAAAJAAAABwICAAAAAAAAAAMAAAAA"
            "AAAAAAA");
}

TEST(Handle, TheLargestFits) { EXPECT_LE(encode(largest()).size(), kMostHandleBytes); }

TEST(Handle, ABodyThatIsCutIsRefused) { expect_no_prefix(encode(handle()), decode_handle); }

TEST(Handle, HasOneSpelling) {
  expect_one_spelling(encode(handle()), decode_handle, [](const Handle& h) { return encode(h); });
}

TEST(Handle, TextHasOneSpelling) {
  std::string text = to_text(handle());
  for (char& digit : text) {
    const char before = digit;
    for (int value = 0; value < 256; ++value) {
      digit = static_cast<char>(value);
      try {
        ASSERT_EQ(to_text(handle_from_text(text)), text);
      } catch (const InputError&) {
        ASSERT_NE(digit, before);
      }
    }
    digit = before;
  }
}

TEST(Handle, TextThatIsCutOrLengthenedIsRefused) {
  const std::string text = to_text(handle());
  for (size_t length = 0; length < text.size(); ++length) {
    ASSERT_TRUE(refused(text.substr(0, length))) << length;
  }
  EXPECT_TRUE(refused(text + 'A'));
  EXPECT_TRUE(refused(text + '='));
  EXPECT_TRUE(refused(text + '\n'));
  EXPECT_TRUE(refused(' ' + text));
  EXPECT_TRUE(refused(text + std::string(1 << 20, 'A')));
}

TEST(Handle, AnotherVersionIsNamed) {
  Bytes bytes = encode(handle());
  bytes.front() = std::byte{2};
  try {
    decode_handle(bytes);
    FAIL() << "taken";
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(),
                 "a store handle cannot be read: it is of version 2, and this process reads "
                 "version 1");
  }
}

TEST(Handle, WhatIsTooLongIsRefusedUnread) {
  EXPECT_THROW(decode_handle(Bytes(kMostHandleBytes + 1)), InputError);
}

TEST(Handle, HandlesOfAnOwnerShareItsOrigin) {
  Handle next = handle();
  next.id.slot = 6;
  const Handle a = decode_handle(encode(handle()));
  const Handle b = decode_handle(encode(next));
  EXPECT_EQ(a.origin, b.origin);
}

TEST(Handle, OriginsAreSharedAmongSeveralOwnersInTurn) {
  std::vector<Handle> handles;
  for (int round = 0; round < 3; ++round) {
    for (int32_t rank = 0; rank < 8; ++rank) {
      Handle one = handle();
      one.origin = std::make_shared<Origin>(origin(rank));
      handles.push_back(decode_handle(encode(one)));
    }
  }
  for (size_t i = 8; i < handles.size(); ++i) {
    EXPECT_EQ(handles[i].origin, handles[i - 8].origin);
    EXPECT_EQ(handles[i].origin->owner.rank, i % 8);
  }
}

TEST(Handle, ManyOwnersAreNeverMistaken) {
  for (int32_t rank = 0; rank < 100; ++rank) {
    Handle one = handle();
    one.origin = std::make_shared<Origin>(origin(rank));
    ASSERT_EQ(decode_handle(encode(one)).origin->owner.rank, rank);
  }
}

TEST(Handle, ThreadsDecodeAtTheSameTime) {
  const auto decode_many = [] {
    for (int32_t i = 0; i < 2000; ++i) {
      Handle one = handle();
      one.origin = std::make_shared<Origin>(origin(i % 10));
      ASSERT_EQ(decode_handle(encode(one)), one);
    }
  };
  std::jthread other(decode_many);
  decode_many();
}

TEST(Handle, EqualityIsByValue) {
  EXPECT_EQ(handle(), handle()) << "origins that are two are equal";
  const auto differs = [](auto change) {
    Handle changed = handle();
    change(changed);
    return changed != handle();
  };
  EXPECT_TRUE(differs([](Handle& h) { h.origin = std::make_shared<Origin>(origin(4)); }));
  EXPECT_TRUE(differs([](Handle& h) { h.origin = nullptr; }));
  EXPECT_TRUE(differs([](Handle& h) { h.scope.id = "169"; }));
  EXPECT_TRUE(differs([](Handle& h) { h.id.generation = 10; }));
  EXPECT_TRUE(differs([](Handle& h) { h.layout.dtype = Dtype::int32; }));
  EXPECT_TRUE(differs([](Handle& h) { h.unstored = "nobody collects it"; }));
}

TEST(Handle, TextForPeople) {
  EXPECT_EQ(handle_text(handle()), "64.0 MiB float32 [4096, 4096] of trainer 3 in step 168");
  Handle nothing = handle();
  nothing.unstored = "nobody collects it";
  EXPECT_EQ(handle_text(nothing),
            "64.0 MiB float32 [4096, 4096] of trainer 3 in step 168, not stored: nobody collects "
            "it");
}

TEST(Handle, AReasonOfAnyBytesIsMadeProse) {
  Handle odd = handle();
  odd.unstored = "\x1b[2J" + std::string(1000, 'x');
  const auto back = decode_handle(encode(odd)).unstored;
  EXPECT_EQ(back, "?[2J" + std::string(508, 'x'));
}

TEST(Handle, WhatCannotBeSentIsRefused) {
  const auto cannot = [](auto change) {
    Handle changed = handle();
    change(changed);
    try {
      encode(changed);
      return false;
    } catch (const InputError&) {
      return true;
    }
  };
  EXPECT_TRUE(cannot([](Handle& h) { h.origin = nullptr; }));
  EXPECT_TRUE(cannot([](Handle& h) { h.scope.kind = ""; }));
  EXPECT_TRUE(cannot([](Handle& h) { h.layout.shape = {-1}; }));
  EXPECT_TRUE(cannot([](Handle& h) { h.layout.dtype = static_cast<Dtype>(99); }));
}

}  // namespace
}  // namespace tenure::store
