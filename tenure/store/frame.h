// A whole message as bytes: header and body. Torch-free.
#pragma once

#include <tenure/store/messages.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tenure::store {

inline void append_frame(std::vector<std::byte>& to, MessageKind kind,
                         std::span<const std::byte> body, uint64_t payload_bytes = 0) {
  const auto header = encode(Header{kind, static_cast<uint32_t>(body.size()), payload_bytes});
  to.insert(to.end(), header.begin(), header.end());
  to.insert(to.end(), body.begin(), body.end());
}

inline std::vector<std::byte> frame(MessageKind kind, std::span<const std::byte> body = {},
                                    uint64_t payload_bytes = 0) {
  std::vector<std::byte> made;
  made.reserve(kHeaderBytes + body.size());
  append_frame(made, kind, body, payload_bytes);
  return made;
}

}  // namespace tenure::store
