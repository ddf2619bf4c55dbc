// How a session offloads. Plain data.
#pragma once

#include <tenure/offload/copier.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

namespace tenure::offload {

// What happens when the host limit is reached.
enum class HostFull : uint8_t { keep, raise };

// Where activations rest.
enum class Target : uint8_t {
  host,  // pinned memory, for tensors on the accelerator
  copy,  // plain memory, for tensors on the CPU: the same machinery without an accelerator
  disk,  // files in `folder`
};

struct Options {
  Target target = Target::host;
  std::string folder;              // of Target::disk
  std::optional<uint64_t> budget;  // the device's peak of allocated bytes; none: all that can go
  uint64_t host_limit = std::numeric_limits<uint64_t>::max();
  HostFull host_full = HostFull::raise;
  Streams streams = Streams::two;
  // What can be made again more cheaply than held may be: `budget` is required.
  bool recompute = false;
  // With `recompute`: whether anything is moved, beside what is profiled and audited.
  bool moves = true;
  // The part of what is dropped that is compared, when it is made again, with what it was.
  double audit = 0.001;
  // Smaller storages are kept. None: derived from what a copy costs.
  std::optional<uint64_t> min_bytes;
};

}  // namespace tenure::offload
