// A step as the fit planner sees it.
#pragma once

#include <tenure/offload/timeline.h>
#include <tenure/offload/trace.h>

#include <cstdint>

namespace tenure::offload {

struct Step {
  Timeline timeline;
  Trace trace;

  // What a step that keeps everything holds at the end of forward, of that which it need not.
  uint64_t saved_bytes() const {
    uint64_t bytes = 0;
    for (const auto& saved : timeline.saved) {
      bytes += saved.gone == kNever ? 0 : saved.bytes;
    }
    return bytes;
  }
};

}  // namespace tenure::offload
