#include <tenure/core/where.h>

namespace tenure {

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::forward:
      return "forward";
    case Phase::backward:
      return "backward";
    case Phase::optimizer:
      return "optimizer";
    case Phase::other:
      break;
  }
  return "other";
}

Where& where() {
  thread_local Where here;
  return here;
}

}  // namespace tenure
