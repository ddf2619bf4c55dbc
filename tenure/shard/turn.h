// Turn: which stream has used some memory last, so that what another one does with it comes after.
// Where there are no streams it costs a comparison. One thread at a time.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <optional>

namespace tenure::shard {

class Turn {
 public:
  // What the current stream does from now on comes after what the one before it had queued.
  void take(c10::Device device);
  // The same, and the memory does not go before the current stream is done with it.
  void take(const c10::Storage& memory);

 private:
  std::optional<c10::Stream> last_;
  bool several_ = false;
};

}  // namespace tenure::shard
