#include <tenure/shard/turn.h>

#include <tenure/core/fence.h>
#include <tenure/core/streams.h>

namespace tenure::shard {

void Turn::take(c10::Device device) {
  if (device.is_cpu()) {
    return;
  }
  const auto now = current_stream(device);
  if (last_ && *last_ != now) {
    Fence::record(*last_).wait(now);
    several_ = true;
  }
  last_ = now;
}

void Turn::take(const c10::Storage& memory) {
  take(memory.device());
  if (several_) {
    used_on(memory, current_stream(memory.device()));
  }
}

}  // namespace tenure::shard
