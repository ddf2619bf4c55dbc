#include <tenure/store/same_bytes.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace tenure::store {
namespace {

bool same_from(const Content& content, uint64_t begin, std::span<const std::byte> bytes) {
  if (const auto memory = content.memory(); memory.data() != nullptr) {
    return std::ranges::equal(memory.subspan(begin, bytes.size()), bytes);
  }
  std::vector<std::byte> piece(std::min<size_t>(bytes.size(), 1 << 20));
  for (size_t offset = 0; offset < bytes.size(); offset += piece.size()) {
    const auto length = std::min(piece.size(), bytes.size() - offset);
    content.read(begin + offset, std::span(piece).first(length));
    if (std::memcmp(piece.data(), bytes.data() + offset, length) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool same_bytes(const Content& content, const Source& source) {
  if (content.bytes() != source.bytes()) {
    return false;
  }
  bool same = true;
  uint64_t offset = 0;
  source.drain([&](std::span<const std::byte> stretch) {
    same = same && same_from(content, offset, stretch);
    offset += stretch.size();
  });
  return same;
}

}  // namespace tenure::store
