#include <tenure/pipeline/microbatch_scopes.h>

#include <tenure/core/error.h>
#include <tenure/core/names.h>

#include <utility>

namespace tenure::pipeline {

ScopeId MicrobatchScopes::of(uint32_t microbatch) {
  auto [found, is_new] = open_.try_emplace(microbatch, ScopeId::process);
  if (is_new) {
    static const auto name = intern("microbatch");
    found->second = open_scope({.name = name, .count = microbatch}, OnClose::report);
  }
  return found->second;
}

void MicrobatchScopes::close(uint32_t microbatch) {
  const auto found = open_.extract(microbatch);
  if (found.empty()) {
    return;
  }
  if (const auto left = close_scope(found.mapped(), Ending::normal); !left.empty()) {
    throw ScopeError(left.text());
  }
}

void MicrobatchScopes::drop() {
  for (const auto& [microbatch, scope] : std::exchange(open_, {})) {
    close_scope(scope, Ending::exception);
  }
}

}  // namespace tenure::pipeline
