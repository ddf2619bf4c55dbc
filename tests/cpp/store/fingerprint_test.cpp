#include <tenure/store/fingerprint.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tenure::store {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::string_view kHex = "0123456789abcdef";

Bytes sample(size_t length) {
  Bytes bytes(length);
  uint32_t state = 1;
  for (std::byte& byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<std::byte>(state >> 24U);
  }
  return bytes;
}

TEST(Fingerprint, EverySplitGivesTheSame) {
  const Bytes bytes = sample(200);
  const Fingerprint whole = fingerprint(bytes);
  for (size_t first = 0; first <= bytes.size(); ++first) {
    for (size_t second = first; second <= bytes.size(); ++second) {
      Fingerprinter parts;
      parts.add(std::span(bytes).first(first));
      parts.add(std::span(bytes).subspan(first, second - first));
      parts.add(std::span(bytes).subspan(second));
      ASSERT_EQ(parts.finish(), whole) << first << ' ' << second;
    }
  }
}

TEST(Fingerprint, FinishLeavesItOpenForMore) {
  const Bytes bytes = sample(150);
  Fingerprinter parts;
  parts.add(std::span(bytes).first(70));
  EXPECT_EQ(parts.finish(), fingerprint(std::span(bytes).first(70)));
  parts.add(std::span(bytes).subspan(70));
  EXPECT_EQ(parts.finish(), fingerprint(bytes));
}

TEST(Fingerprint, EveryBitCounts) {
  Bytes bytes = sample(3 * 64 + 17);
  std::set<Fingerprint> seen{fingerprint(bytes)};
  for (std::byte& byte : bytes) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      byte ^= std::byte{1} << bit;
      EXPECT_TRUE(seen.insert(fingerprint(bytes)).second);
      byte ^= std::byte{1} << bit;
    }
  }
}

TEST(Fingerprint, ZerosOfEveryLengthDiffer) {
  std::set<Fingerprint> seen;
  for (size_t length = 0; length <= 1000; ++length) {
    seen.insert(fingerprint(Bytes(length)));
  }
  EXPECT_EQ(seen.size(), 1001);
}

TEST(Fingerprint, WordsAndBlocksHaveAnOrder) {
  const Bytes bytes = sample(256);
  std::set<Fingerprint> seen{fingerprint(bytes)};
  size_t orders = 1;
  for (size_t first = 0; first < bytes.size(); first += 8) {
    for (size_t second = first + 8; second < bytes.size(); second += 8) {
      Bytes swapped = bytes;
      std::swap_ranges(swapped.begin() + static_cast<ptrdiff_t>(first),
                       swapped.begin() + static_cast<ptrdiff_t>(first + 8),
                       swapped.begin() + static_cast<ptrdiff_t>(second));
      seen.insert(fingerprint(swapped));
      ++orders;
    }
  }
  EXPECT_EQ(seen.size(), orders);
}

// One sign, and each pair of signs, of 64 numbers: what a multiplication alone lets cancel.
TEST(Fingerprint, SignsDoNotCancel) {
  Bytes bytes = sample(256);
  std::set<Fingerprint> seen{fingerprint(bytes)};
  size_t variants = 1;
  const auto flip = [&](size_t number) { bytes[number * 4 + 3] ^= std::byte{0x80}; };
  for (size_t a = 0; a < 64; ++a) {
    flip(a);
    seen.insert(fingerprint(bytes));
    ++variants;
    for (size_t b = a + 1; b < 64; ++b) {
      flip(b);
      seen.insert(fingerprint(bytes));
      ++variants;
      for (size_t c = b + 1; c < 64; ++c) {
        flip(c);
        seen.insert(fingerprint(bytes));
        ++variants;
        flip(c);
      }
      flip(b);
    }
    flip(a);
  }
  EXPECT_EQ(seen.size(), variants);
}

TEST(Fingerprint, HalfOfTheBitsChangeWithAnyOne) {
  Bytes bytes = sample(128);
  const Fingerprint before = fingerprint(bytes);
  for (size_t at : {size_t{0}, size_t{63}, size_t{64}, size_t{127}}) {
    bytes[at] ^= std::byte{0x80};
    const Fingerprint after = fingerprint(bytes);
    int changed = 0;
    for (size_t i = 0; i < after.size(); ++i) {
      changed += std::popcount(std::to_integer<unsigned>(before[i] ^ after[i]));
    }
    EXPECT_GT(changed, 32) << at;
    EXPECT_LT(changed, 96) << at;
    bytes[at] ^= std::byte{0x80};
  }
}

// Other versions compare with what this one says: a change is a change of the protocol.
TEST(Fingerprint, IsWhatItAlwaysWas) {
  const auto text = [](const Fingerprint& print) {
    std::string out;
    for (const std::byte byte : print) {
      out += kHex[std::to_integer<size_t>(byte >> 4U)];
      out += kHex[std::to_integer<size_t>(byte & std::byte{15})];
    }
    return out;
  };
  EXPECT_EQ(text(fingerprint({})), "c50a666aa6d05269eba69ef1ba1d566a");
  EXPECT_EQ(text(fingerprint(sample(1000))), "064e139b95a65045327ee2e0d768b283");
}

}  // namespace
}  // namespace tenure::store
