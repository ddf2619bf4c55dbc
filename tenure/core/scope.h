// Scope: a named stretch of the program, at whose end what was leased in it must be gone. Scopes
// nest; the current one is where a new lease goes.
//
// Note [Which scope is current]
// In C++ scopes are a stack per thread. A language runtime may know better: Python's scopes follow
// contextvars, so that asyncio tasks interleave on one thread; it installs LanguageScopes. Where
// both have an answer the deeper scope is the inner one. A thread that has no scope of its own but
// runs autograd's nodes for another thread uses the scope of the thread that called backward():
// ScopeCarrier brings it there. Else it is the process scope, which never closes.
#pragma once

#include <tenure/core/lease_table.h>
#include <tenure/core/owner.h>
#include <tenure/core/scope_tree.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tenure {

// What was still leased when a scope closed, largest first.
struct ScopeReport {
  std::string scope;  // empty if nothing was left
  OnClose on_close = OnClose::report;
  std::vector<std::pair<OwnerId, Totals>> left;
  uint64_t leases = 0;
  uint64_t bytes = 0;
  uint32_t moved_up = 0;  // scopes inside it that are still open, and lie in its parent now

  bool empty() const { return leases == 0; }
  // "scope 'step 12' closed with 2 leases (8.0 KiB) still held: activation 'mlp' (a.py:4) 8.0 KiB…"
  std::string text() const;
};

class Scope {
 public:
  explicit Scope(std::string_view name, OnClose on_close = OnClose::report);
  Scope(std::string_view name, int64_t count, OnClose on_close = OnClose::report);
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  // Closes it if it is open. A destructor cannot throw, so what is left is printed to stderr, also
  // under OnClose::raise; when an exception unwinds, it is released then, and nothing is printed.
  ~Scope();

  ScopeId id() const { return id_; }
  // Throws ScopeError, changing nothing, when it is closed already, is not the innermost scope of
  // this thread, or belongs to another thread (when an exception unwinds, scopes of other threads
  // inside it move to the one around it); and, once closed, if on_close is raise and leases
  // were left. What a subscriber of the clock throws passes through, once closed; beside such a
  // ScopeError it is printed to stderr.
  ScopeReport close();

 private:
  Scope(ScopeLabel label, OnClose on_close);

  ScopeLabel label_;
  ScopeId id_;
  ScopeId outer_;
  uint32_t process_;
  int exceptions_;
  bool open_ = true;
};

// The scope in which the calling thread takes leases.
ScopeId current_scope();

// The two halves of a scope for language runtimes, which keep the current one themselves. A child
// of the current scope; REQUIRES that the name passes check_name.
ScopeId open_scope(ScopeLabel label, OnClose on_close);
// As Scope::close, but leaves it to the caller to throw for OnClose::raise. `exception` says that
// the scope ends because of one: OnClose::raise then releases, so that a failed step keeps nothing,
// and scopes that others still have open inside it move up, so that it can end.
enum class Ending : uint8_t { normal, exception };
ScopeReport close_scope(ScopeId id, Ending ending);
// A scope named `step` is the clock's: its end is the step's, unless it lies inside another one of
// that name, whose step it belongs to. Called after close_scope, once the enclosing scope is
// current again, because subscribers take leases and may throw.
void tell_clock(const ScopeLabel& label);

// How a language runtime says which scope is current on a thread of its own. All three must be
// callable without its global lock. Whoever changes `current` calls language_scope_changed(), or
// the version changes. A scope that has been closed elsewhere is not current any more: the nearest
// one around it that is open is.
struct LanguageScopes {
  void* (*this_thread)();  // null: not a thread of the runtime
  uint64_t (*version)(void* thread);
  ScopeId (*current)(void* thread);
};

// What a thread hands to threads that work for it.
struct CarriedScope {
  ScopeId own = ScopeId::process;
  ScopeId language = ScopeId::process;
  void* thread = nullptr;
  uint64_t version = 0;
};
struct ScopeCarrier {
  void (*carry)(const CarriedScope& scope);
  // The scope of the thread this one works for. `waiting`: that thread is known to wait meanwhile,
  // so its language thread may be asked.
  std::optional<CarriedScope> (*carried)(bool& waiting);
};

// Each is installed once, before the first scope, and lives forever.
void install(const LanguageScopes* language);
void install(const ScopeCarrier* carrier);

// A language's current scope was changed on this thread.
void language_scope_changed();

}  // namespace tenure
