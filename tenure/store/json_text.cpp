#include <tenure/store/json_text.h>

namespace tenure::store {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

// The length of the character of UTF-8 that `text` begins with. None there: 0.
size_t character_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const auto continues = [&](size_t i) { return i < text.size() && (byte(i) & 0xC0U) == 0x80U; };
  const uint8_t first = byte(0);
  if (first < 0x80) {
    return 1;
  }
  if (first >= 0xC2 && first <= 0xDF) {
    return continues(1) ? 2 : 0;
  }
  if (first >= 0xE0 && first <= 0xEF) {
    if (!continues(1) || !continues(2)) {
      return 0;
    }
    const bool overlong = first == 0xE0 && byte(1) < 0xA0;
    const bool surrogate = first == 0xED && byte(1) > 0x9F;
    return overlong || surrogate ? 0 : 3;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    if (!continues(1) || !continues(2) || !continues(3)) {
      return 0;
    }
    const bool overlong = first == 0xF0 && byte(1) < 0x90;
    const bool beyond = first == 0xF4 && byte(1) > 0x8F;
    return overlong || beyond ? 0 : 4;
  }
  return 0;
}

}  // namespace

void JsonText::separate() {
  if (follows_) {
    text_ += ',';
  }
  follows_ = true;
}

JsonText& JsonText::open(char bracket) {
  separate();
  text_ += bracket;
  follows_ = false;
  return *this;
}

JsonText& JsonText::close(char bracket) {
  text_ += bracket;
  follows_ = true;
  return *this;
}

JsonText& JsonText::key(std::string_view name) {
  separate();
  quote(name);
  text_ += ':';
  follows_ = false;
  return *this;
}

JsonText& JsonText::value(std::string_view text) {
  separate();
  quote(text);
  return *this;
}

void JsonText::quote(std::string_view text) {
  text_ += '"';
  while (!text.empty()) {
    const char first = text.front();
    const size_t bytes = character_bytes(text);
    if (bytes == 0) {
      text_ += "\\ufffd";
      text.remove_prefix(1);
      continue;
    }
    if (first == '"' || first == '\\') {
      text_ += '\\';
      text_ += first;
    } else if (static_cast<uint8_t>(first) < 0x20 || first == 0x7F) {
      text_ += "\\u00";
      text_ += kHexDigits[static_cast<uint8_t>(first) >> 4U];
      text_ += kHexDigits[static_cast<uint8_t>(first) & 15U];
    } else {
      text_ += text.substr(0, bytes);
    }
    text.remove_prefix(bytes);
  }
  text_ += '"';
}

}  // namespace tenure::store
