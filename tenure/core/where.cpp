#include <tenure/core/where.h>

#include <tenure/core/fast_tls.h>

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
  static TENURE_FAST_TLS Where here;
  return here;
}

}  // namespace tenure
