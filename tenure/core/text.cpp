#include <tenure/core/text.h>

#include <array>
#include <cstdio>

namespace tenure {

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
