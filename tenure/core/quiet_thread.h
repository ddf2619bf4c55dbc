// A thread of Tenure's own that no signal of the program's is delivered to.
#pragma once

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <pthread.h>

#include <csignal>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

namespace tenure {

// Throws Error, with `what` it would have been ("the sampler's thread"), if it cannot be started.
template <class Body>
std::jthread quiet_thread(std::string_view what, Body body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::jthread thread;
  std::error_code error;
  try {
    thread = std::jthread(std::move(body));
  } catch (const std::system_error& failure) {
    error = failure.code();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error) {
    throw Error(text(what, " could not be started (", error.message(),
                     "); raise the limit on threads (ulimit -u, pids.max)"));
  }
  return thread;
}

}  // namespace tenure
