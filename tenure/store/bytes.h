// Numbers and texts as little-endian bytes of fixed widths, so that a value has one form alone.
// Torch-free. Threading: each from one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tenure::store {

// Appends. Texts longer than their length can say are the caller's to check: they throw InputError.
class ByteWriter {
 public:
  explicit ByteWriter(size_t expected = 0) { bytes_.reserve(expected); }

  void u8(uint8_t value) { little(value, 1); }
  void u16(uint16_t value) { little(value, 2); }
  void u32(uint32_t value) { little(value, 4); }
  void u64(uint64_t value) { little(value, 8); }
  void raw(std::span<const std::byte> bytes);
  void text(std::string_view bytes);       // 2 bytes of length, then the bytes
  void long_text(std::string_view bytes);  // 4 bytes of length

  [[nodiscard]] size_t size() const { return bytes_.size(); }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void little(uint64_t value, size_t width);

  std::vector<std::byte> bytes_;
};

// Reads what a stranger wrote. Each call throws InputError, naming `what`, if the bytes end before
// it does or exceed the limit given; nothing is allocated before that is known.
class ByteReader {
 public:
  // `what` ("a handle") and `bytes` outlive the reader.
  ByteReader(std::span<const std::byte> bytes, std::string_view what) : left_(bytes), what_(what) {}

  uint8_t u8() { return static_cast<uint8_t>(little(1)); }
  uint16_t u16() { return static_cast<uint16_t>(little(2)); }
  uint32_t u32() { return static_cast<uint32_t>(little(4)); }
  uint64_t u64() { return little(8); }
  bool flag();  // 0 or 1 alone
  void raw(std::span<std::byte> into);
  std::span<const std::byte> raw(size_t count);
  std::string line(size_t most);        // 2 bytes of length; a text that is_line()
  std::string prose(size_t most);       // the same that is_prose()
  std::string long_prose(size_t most);  // 4 bytes of length
  // A number of items that follow, each at least `item_bytes`.
  uint32_t count(size_t most, size_t item_bytes);

  [[nodiscard]] size_t left() const { return left_.size(); }
  // Nothing may be left.
  void finish() const;
  // Throws InputError: "a handle cannot be read: ...".
  [[noreturn]] void refuse(std::string_view why) const;

 private:
  uint64_t little(size_t width);
  std::string_view characters(size_t count, size_t most);

  std::span<const std::byte> left_;
  std::string_view what_;
};

}  // namespace tenure::store
