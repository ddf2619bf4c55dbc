// What holds of every form in bytes: it has one spelling, and nothing that is cut or changed is
// taken for something else.
#pragma once

#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace tenure::store {

using Bytes = std::vector<std::byte>;

// None: refused. Any other exception than InputError fails the test.
template <class Decode>
auto decoded(const Decode& decode, std::span<const std::byte> bytes)
    -> std::optional<decltype(decode(bytes))> {
  try {
    return decode(bytes);
  } catch (const InputError&) {
    return std::nullopt;
  }
}

// Each way to cut `whole` short, and to lengthen it, is refused.
template <class Decode>
void expect_no_prefix(const Bytes& whole, const Decode& decode) {
  ASSERT_TRUE(decoded(decode, whole));
  for (size_t length = 0; length < whole.size(); ++length) {
    ASSERT_FALSE(decoded(decode, std::span(whole).first(length))) << "cut to " << length;
  }
  Bytes longer = whole;
  longer.push_back(std::byte{0});
  ASSERT_FALSE(decoded(decode, longer)) << "a byte more";
}

// Each other value of each byte (of a long form, each bit of each byte) is refused, or is the
// spelling of another value.
template <class Decode, class Encode>
void expect_one_spelling(const Bytes& whole, const Decode& decode, const Encode& encode) {
  const bool is_long = whole.size() > 200;
  Bytes changed = whole;
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int flip = 1; flip < 256; flip = is_long ? 2 * flip : flip + 1) {
      changed[at] = whole[at] ^ static_cast<std::byte>(flip);
      if (const auto value = decoded(decode, changed)) {
        ASSERT_EQ(encode(*value), changed) << "byte " << at << " changed by " << flip;
      }
    }
    changed[at] = whole[at];
  }
}

}  // namespace tenure::store
