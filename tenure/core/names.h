// Interned names: scopes, owners, modules and ops are written once and passed around as 4 bytes.
// Any thread may call; lookups take a short lock and are meant for reports, not for hot paths.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tenure {

enum class NameId : uint32_t { none = 0 };

// Longest name, in bytes, and the most different names a process may intern. Names live forever,
// so a name that changes every step would grow without end: use a scope's counter for that.
inline constexpr size_t kLongestName = 256;
inline constexpr size_t kMostNames = size_t{1} << 20;

// Throws InputError, naming `what`, unless `name` is printable, on one line and short enough.
void check_name(std::string_view name, std::string_view what);

// What was not chosen as a name, mended so that it may be one or stand in an error: its last
// kLongestName bytes, with '?' for each character that ends a line or controls a terminal.
std::string fitting(std::string_view text);

// The id of `name`; equal names have equal ids. REQUIRES: the name passes check_name.
NameId intern(std::string_view name);

// The name again; "" for NameId::none. Valid for the life of the process.
std::string_view name_of(NameId id);

}  // namespace tenure
