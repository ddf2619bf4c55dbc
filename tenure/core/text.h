// How Tenure writes numbers and sentences. One place, so that errors, tables and reports agree.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

namespace tenure {

// Streams its arguments into one string.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

// At most `bytes` of `name` from its front or its end, no character of UTF-8 cut in two.
std::string_view front_of(std::string_view name, size_t bytes);
std::string_view end_of(std::string_view name, size_t bytes);

// Up to the first line break: errors of torch go on with the calls that led to them.
std::string_view first_line(std::string_view text);

// 1536 -> "1.5 KiB". Exact below 1 KiB.
std::string bytes_text(uint64_t bytes);

// 1 -> "1 lease", 3 -> "3 leases".
std::string count_text(uint64_t count, const char* noun);

}  // namespace tenure
