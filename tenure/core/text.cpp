#include <tenure/core/text.h>

#include <array>
#include <cstdio>

namespace tenure {
namespace {

bool inside_a_character(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

}  // namespace

std::string_view front_of(std::string_view name, size_t bytes) {
  while (bytes > 0 && bytes < name.size() && inside_a_character(name[bytes])) {
    --bytes;
  }
  return name.substr(0, bytes);
}

std::string_view end_of(std::string_view name, size_t bytes) {
  size_t begin = name.size() > bytes ? name.size() - bytes : 0;
  while (begin > 0 && begin < name.size() && inside_a_character(name[begin])) {
    ++begin;
  }
  return name.substr(begin);
}

std::string_view first_line(std::string_view text) { return text.substr(0, text.find('\n')); }

std::string bytes_text(uint64_t bytes) {
  if (bytes < 1024) {
    return std::to_string(bytes) + " B";
  }
  constexpr std::array units{"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < units.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 32> out{};
  std::snprintf(out.data(), out.size(), "%.1f %s", value, units[unit]);
  return out.data();
}

std::string count_text(uint64_t count, const char* noun) {
  return text(count, ' ', noun, count == 1 ? "" : "s");
}

}  // namespace tenure
