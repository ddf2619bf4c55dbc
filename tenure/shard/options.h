// How a model is sharded. Plain data.
#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>

namespace tenure::shard {

enum class AfterForward : uint8_t {
  release,  // and gather again for backward
  keep,     // until backward is done
};

// How long a unit stays gathered.
enum class Stay : uint8_t {
  while_used,
  whole_pass,  // from its first use until the end of backward, or until the next pass begins
};

// Where a rank keeps its pieces, and with them their gradients and what an optimizer has for them.
enum class Pieces : uint8_t {
  on_device,  // of the model
  on_host,    // in pinned memory
};

struct Options {
  std::optional<c10::ScalarType> gathered;  // dtype of gathered parameters; none: as they are kept
  std::optional<c10::ScalarType> reduced;  // dtype in which gradients are added up; none: their own
  AfterForward after_forward = AfterForward::release;
  Pieces pieces = Pieces::on_device;
  uint32_t prefetch = 1;  // units that are gathered ahead
  // Units are gathered ahead only as long as all that is gathered stays below.
  uint64_t prefetch_bytes = std::numeric_limits<uint64_t>::max();
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of one collective
};

}  // namespace tenure::shard
