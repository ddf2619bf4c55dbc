#include <tenure/store/characters.h>

#include <tenure/core/text.h>

#include <cstdint>

namespace tenure::store {
namespace {

enum class Controls : uint8_t { none, breaks };  // breaks: newline and tab

uint8_t byte_at(std::string_view bytes, size_t at) { return static_cast<uint8_t>(bytes[at]); }

// The length of the character that begins at `at`. 0: it is none, or a control character.
size_t character_at(std::string_view bytes, size_t at, Controls allowed) {
  const uint8_t first = byte_at(bytes, at);
  if (first < 0x80) {
    const bool is_break = first == '\n' || first == '\t';
    const bool is_control = first < 0x20 || first == 0x7f;
    return !is_control || (is_break && allowed == Controls::breaks) ? 1 : 0;
  }
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || bytes.size() - at < length) {
    return 0;
  }
  uint32_t code = first & (0x7fU >> length);
  for (size_t i = 1; i < length; ++i) {
    const uint8_t next = byte_at(bytes, at + i);
    if ((next & 0xc0U) != 0x80) {
      return 0;
    }
    code = (code << 6U) | (next & 0x3fU);
  }
  const bool too_long = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  const bool control = code < 0xa0;
  return too_long || surrogate || control || code > 0x10ffff ? 0 : length;
}

bool all_fit(std::string_view bytes, Controls allowed) {
  for (size_t at = 0; at < bytes.size();) {
    const size_t length = character_at(bytes, at, allowed);
    if (length == 0) {
      return false;
    }
    at += length;
  }
  return true;
}

}  // namespace

bool is_line(std::string_view bytes) { return all_fit(bytes, Controls::none); }

bool is_prose(std::string_view bytes) { return all_fit(bytes, Controls::breaks); }

std::string as_prose(std::string_view bytes, size_t most) {
  std::string out;
  out.reserve(bytes.size() < most ? bytes.size() : most);
  for (size_t at = 0; at < bytes.size();) {
    const size_t length = character_at(bytes, at, Controls::breaks);
    if (out.size() + (length == 0 ? 1 : length) > most) {
      break;
    }
    out.append(length == 0 ? "?" : bytes.substr(at, length));
    at += length == 0 ? 1 : length;
  }
  return out;
}

}  // namespace tenure::store
