// FNV-1a: tells texts and files apart that differ by accident, not by malice.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tenure::train {

constexpr uint64_t kHashOfNothing = 0xcbf29ce484222325;

// Of what came before, which has the hash `before`, and these bytes after it.
inline uint64_t hash_of(const void* data, size_t bytes, uint64_t before = kHashOfNothing) {
  constexpr uint64_t prime = 0x100000001b3;
  const auto* from = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) {
    before = (before ^ from[i]) * prime;
  }
  return before;
}

}  // namespace tenure::train
