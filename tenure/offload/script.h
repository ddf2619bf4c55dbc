// Script: what the calls of a profiled forward were, by which a step that follows its plan knows
// them again. Beside the Trace of the same forward; plain data.
#pragma once

#include <tenure/offload/interpose.h>
#include <tenure/offload/trace.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace tenure::offload {

struct Scripted {
  const Operator* op = nullptr;
  uint64_t bytes = 0;             // of its first output's storage
  std::vector<uint32_t> tensors;  // the value of each tensor argument; kNone: a number
  std::vector<std::pair<uint32_t, uint32_t>> makes;  // output, value
};

struct Script {
  Trace trace;
  std::vector<Scripted> calls;  // as trace.calls
};

}  // namespace tenure::offload
