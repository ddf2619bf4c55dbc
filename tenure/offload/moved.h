// Moved: bytes that went one way, and what part of that was timed. Plain data.
#pragma once

#include <cstdint>

namespace tenure::offload {

struct Moved {
  uint64_t bytes = 0;
  uint64_t timed_bytes = 0;
  double seconds = 0;
  double bandwidth() const { return seconds > 0 ? static_cast<double>(timed_bytes) / seconds : 0; }
};

}  // namespace tenure::offload
