#include <tenure/store/bytes.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/characters.h>

#include <algorithm>
#include <array>
#include <limits>

namespace tenure::store {

void ByteWriter::little(uint64_t value, size_t width) {
  std::array<std::byte, sizeof value> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(value >> (8 * i));
  }
  raw(std::span(bytes).first(width));
}

void ByteWriter::raw(std::span<const std::byte> bytes) {
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

void ByteWriter::text(std::string_view bytes) {
  if (bytes.size() > std::numeric_limits<uint16_t>::max()) {
    throw InputError(tenure::text("a text of ", bytes_text(bytes.size()),
                                  " is too long for the store's messages: at most 65535 bytes"));
  }
  u16(static_cast<uint16_t>(bytes.size()));
  raw(std::as_bytes(std::span(bytes)));
}

void ByteWriter::long_text(std::string_view bytes) {
  if (bytes.size() > std::numeric_limits<uint32_t>::max()) {
    throw InputError(tenure::text("a text of ", bytes_text(bytes.size()),
                                  " is too long for the store's messages: at most 4 GiB"));
  }
  u32(static_cast<uint32_t>(bytes.size()));
  raw(std::as_bytes(std::span(bytes)));
}

void ByteReader::refuse(std::string_view why) const {
  throw InputError(text(what_, " cannot be read: ", why));
}

std::span<const std::byte> ByteReader::raw(size_t count) {
  if (count > left_.size()) {
    refuse("it ends too early");
  }
  const auto bytes = left_.first(count);
  left_ = left_.subspan(count);
  return bytes;
}

void ByteReader::raw(std::span<std::byte> into) {
  std::ranges::copy(raw(into.size()), into.begin());
}

uint64_t ByteReader::little(size_t width) {
  const auto bytes = raw(width);
  uint64_t value = 0;
  for (size_t i = 0; i < width; ++i) {
    value |= std::to_integer<uint64_t>(bytes[i]) << (8 * i);
  }
  return value;
}

bool ByteReader::flag() {
  const uint8_t value = u8();
  if (value > 1) {
    refuse("a flag in it is neither 0 nor 1");
  }
  return value == 1;
}

std::string_view ByteReader::characters(size_t count, size_t most) {
  if (count > most) {
    refuse(text("a text in it has ", count, " bytes, and at most ", most, " belong there"));
  }
  const auto bytes = raw(count);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string ByteReader::line(size_t most) {
  const auto bytes = characters(u16(), most);
  if (!is_line(bytes)) {
    refuse("a name in it is not UTF-8, or has control characters");
  }
  return std::string(bytes);
}

std::string ByteReader::prose(size_t most) {
  const auto bytes = characters(u16(), most);
  if (!is_prose(bytes)) {
    refuse("a text in it is not UTF-8, or has control characters");
  }
  return std::string(bytes);
}

std::string ByteReader::long_prose(size_t most) {
  const auto bytes = characters(u32(), most);
  if (!is_prose(bytes)) {
    refuse("a text in it is not UTF-8, or has control characters");
  }
  return std::string(bytes);
}

uint32_t ByteReader::count(size_t most, size_t item_bytes) {
  const uint32_t count = u32();
  if (count > most) {
    refuse(text("it says that it has ", count, " items, and at most ", most, " belong there"));
  }
  if (count * item_bytes > left_.size()) {
    refuse("it ends too early");
  }
  return count;
}

void ByteReader::finish() const {
  if (!left_.empty()) {
    refuse(text("bytes are left over at its end: ", left_.size()));
  }
}

}  // namespace tenure::store
