// Where: what the calling thread is doing in the user's terms. Set by whoever knows (module hooks,
// dispatcher interposition), read by whoever records (inspect, offload). Per thread; no locks.
#pragma once

#include <tenure/core/names.h>

#include <cstdint>

namespace tenure {

enum class Phase : uint8_t { other, forward, backward, optimizer };
const char* phase_name(Phase phase);

struct Where {
  Phase phase = Phase::other;
  NameId module = NameId::none;  // "model.layers.3.mlp"
  NameId op = NameId::none;      // "aten::mm"
};

// The calling thread's. Plain data: may be used while the thread ends.
Where& where();

// Sets it and puts back what was there.
class At {
 public:
  explicit At(Where there) : outer_(where()) { where() = there; }
  ~At() { where() = outer_; }
  At(const At&) = delete;
  At& operator=(const At&) = delete;

 private:
  Where outer_;
};

}  // namespace tenure
