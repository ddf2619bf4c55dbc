#include <tenure/inspect/redactor.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstring>

namespace tenure::inspect {
namespace {

// SipHash-2-4, a keyed hash: without the key a name cannot be guessed by trying names.
uint64_t sip_hash(const std::array<uint64_t, 2>& key, std::string_view text) {
  std::array<uint64_t, 4> v{key[0] ^ 0x736f6d6570736575ULL, key[1] ^ 0x646f72616e646f6dULL,
                            key[0] ^ 0x6c7967656e657261ULL, key[1] ^ 0x7465646279746573ULL};
  const auto round = [&] {
    v[0] += v[1];
    v[1] = std::rotl(v[1], 13) ^ v[0];
    v[0] = std::rotl(v[0], 32);
    v[2] += v[3];
    v[3] = std::rotl(v[3], 16) ^ v[2];
    v[0] += v[3];
    v[3] = std::rotl(v[3], 21) ^ v[0];
    v[2] += v[1];
    v[1] = std::rotl(v[1], 17) ^ v[2];
    v[2] = std::rotl(v[2], 32);
  };
  const auto take = [&](uint64_t word) {
    v[3] ^= word;
    round();
    round();
    v[0] ^= word;
  };
  const auto length = text.size();
  for (; text.size() >= 8; text.remove_prefix(8)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data(), 8);
    take(word);
  }
  uint64_t last = 0;
  std::memcpy(&last, text.data(), text.size());
  take(last | static_cast<uint64_t>(length) << 56);
  v[2] ^= 0xff;
  for (int i = 0; i < 4; ++i) {
    round();
  }
  return v[0] ^ v[1] ^ v[2] ^ v[3];
}

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

// Letters beyond ASCII may be part of a name.
bool in_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

// "→", "…", "←" and "·" are Tenure's own punctuation.
size_t punctuation_at(std::string_view text) {
  for (const std::string_view mark : {"→", "…", "←", "·"}) {
    if (text.starts_with(mark)) {
      return mark.size();
    }
  }
  return 0;
}

// "MmBackward0": generated nodes end in a number, and a user's own functions do not.
bool is_node(std::string_view word) {
  const auto at = word.find("Backward");
  return at != std::string_view::npos && at + 8 < word.size() &&
         std::ranges::all_of(word.substr(at + 8), is_digit);
}

}  // namespace

Redactor::Redactor(std::string_view key, const std::vector<std::string>& known)
    : active_(true), known_(known.begin(), known.end()) {
  key_ = {sip_hash({1, 2}, key), sip_hash({3, 4}, key)};
}

bool Redactor::is_known(std::string_view word) const {
  return std::ranges::all_of(word, is_digit) || is_node(word) || known_.contains(std::string(word));
}

std::string Redactor::hashed(std::string_view word) const {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string out = "x";
  auto hash = sip_hash(key_, word);
  for (int i = 0; i < 10; ++i, hash >>= 4) {
    out += digits[hash & 15];
  }
  return out;
}

std::string Redactor::operator()(std::string_view text) const {
  if (!active_) {
    return std::string(text);
  }
  std::string out;
  bool is_operator = false;  // of torch's: follows "aten::"
  while (!text.empty()) {
    size_t length = punctuation_at(text);
    if (length == 0 && !in_word(text.front())) {
      length = 1;
    }
    if (length > 0) {
      out += text.substr(0, length);
      is_operator = is_operator && text.front() == ':';
      text.remove_prefix(length);
      continue;
    }
    while (length < text.size() && in_word(text[length]) &&
           punctuation_at(text.substr(length)) == 0) {
      ++length;
    }
    const auto word = text.substr(0, length);
    text.remove_prefix(length);
    const bool space = text.starts_with("::") && (word == "aten" || word == "c10d");
    out += space || is_operator || is_known(word) ? std::string(word) : hashed(word);
    is_operator = space;
  }
  return out;
}

}  // namespace tenure::inspect
