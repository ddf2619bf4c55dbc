// MicrobatchScopes: everything of a microbatch on a rank is leased in a scope of its own, from when
// it is asked for until the rank does nothing more for the microbatch. One thread.
#pragma once

#include <tenure/core/scope.h>

#include <cstdint>
#include <map>

namespace tenure::pipeline {

class MicrobatchScopes {
 public:
  ScopeId of(uint32_t microbatch);
  // Throws ScopeError where it ends as it should and something is left in it.
  void close(uint32_t microbatch);
  // After a failure.
  void drop();

 private:
  std::map<uint32_t, ScopeId> open_;  // by microbatch
};

}  // namespace tenure::pipeline
