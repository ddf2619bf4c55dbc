// Signals: something is done before a signal takes its course.
//
// The handler only notes the signal in a pipe. A thread that takes no signals itself reads it, has
// `before` done and then passes the signal on to what was there: the default action, of which the
// process dies as it would have, or a handler, which runs where the kernel delivers signals.
// Python's own handler is one: a function given to signal.signal() still runs, and as before not
// until the main thread is back from what it waits for. `before` does not wait for that.
//
// Threading: made and destroyed by any thread. A forked child does not note anything: there signals
// go straight to what was there before.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace tenure::telemetry {

class Signals {
 public:
  // Called on the thread, with the signal, which waits for it to return.
  using Before = std::function<void(int)>;

  // A signal that is ignored stays so. Throws InputError while another one lives, and for a signal
  // that nothing can be done before: SIGKILL, SIGSEGV.
  Signals(std::vector<int> signals, Before before);
  // Puts back what was there, unless somebody has replaced ours since. A signal that was noted
  // still gets what is due to it.
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

 private:
  void install();
  void put_back() const;
  void run() const;

  std::vector<int> signals_;  // those that were not ignored
  Before before_;
  uint32_t generation_;
  std::unique_ptr<std::jthread> thread_;
};

}  // namespace tenure::telemetry
