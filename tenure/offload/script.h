// Script: what the calls of a profiled forward were, by which a step that follows its plan knows
// them again. Beside the Trace of the same forward; plain data.
#pragma once

#include <tenure/offload/interpose.h>
#include <tenure/offload/trace.h>

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace tenure::offload {

// In one place, as far as it goes: it is read where no cache has it.
struct Scripted {
  const Operator* op = nullptr;
  NameId module = NameId::none;
  uint64_t bytes = 0;                     // of its first output's storage
  c10::SmallVector<uint32_t, 4> tensors;  // the value of each tensor argument; kNone: a number
  c10::SmallVector<std::pair<uint32_t, uint32_t>, 1> makes;  // output, value
};

struct Script {
  Trace trace;
  std::vector<Scripted> calls;  // as trace.calls
  uint64_t opening = 0;         // what the step began with: Note [What a step begins with]
};

}  // namespace tenure::offload
