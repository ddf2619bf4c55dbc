// What a fork means for Tenure. A forked child inherits the parent's memory but none of its
// threads, and must not act on what the parent owns: it forgets the parent's leases and scopes and
// starts a ledger of its own. Everything here is safe to call from any thread.
#pragma once

#include <cstdint>
#include <mutex>

namespace tenure {

// How many forks lie between the first process and this one. What remembers the generation it was
// made in knows whether it was inherited.
uint32_t fork_generation();

// Keeps `mutex` consistent across fork(): held while the process forks, free again on both sides.
// The mutex must live forever, and must never be held while another protected one is taken.
void protect_across_fork(std::mutex& mutex);

// Runs `fn` in every child, after the protected mutexes are free again. `fn` must not throw.
void on_fork_in_child(void (*fn)());

// Runs them around every fork: `before` before the protected mutexes are taken, the others after
// they are free again. None may throw or register anything.
struct AroundFork {
  void (*before)();
  void (*in_parent)();
  void (*in_child)();
};
void around_fork(const AroundFork& functions);

}  // namespace tenure
