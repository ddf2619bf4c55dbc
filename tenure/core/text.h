// How Tenure writes numbers and sentences. One place, so that errors, tables and reports agree.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

namespace tenure {

// Streams its arguments into one string.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

// 1536 -> "1.5 KiB". Exact below 1 KiB.
std::string bytes_text(uint64_t bytes);

// 1 -> "1 lease", 3 -> "3 leases".
std::string count_text(uint64_t count, const char* noun);

}  // namespace tenure
