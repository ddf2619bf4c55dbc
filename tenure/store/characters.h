// Which bytes are text: what comes from a stranger is shown on terminals and given to Python, and
// must not do anything there but be read. Torch-free.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tenure::store {

// UTF-8 without control characters: what a name may be.
bool is_line(std::string_view bytes);
// The same, with newlines and tabs: what a sentence or JSON may be.
bool is_prose(std::string_view bytes);

// `bytes` made prose, with '?' for each byte that cannot stay, and cut to at most `most` bytes.
std::string as_prose(std::string_view bytes, size_t most);

}  // namespace tenure::store
