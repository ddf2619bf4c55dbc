// Pace: how often something is done that nobody waits for, so that it takes 0.1 % of a core at
// most: after it took a millisecond of CPU time, not again for a second.
//
// Threading: one thread at a time, the one that does it.
#pragma once

#include <algorithm>
#include <chrono>
#include <ctime>

namespace tenure {

class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  // `rarest` comes before the share: it is never put off for longer than that. `free` is what it
  // may take before it is put off at all.
  explicit Pace(Clock::duration rarest, Clock::duration free = {}) : rarest_(rarest), free_(free) {}

  [[nodiscard]] bool is_due() const { return Clock::now() >= next_; }
  // When it is due; before the first time at once.
  [[nodiscard]] Clock::time_point next() const { return next_; }

  template <class Work>
  void run(const Work& work) {
    const auto begin = Clock::now();
    const auto before = worked();
    work();
    const Clock::duration took = worked() - before;
    free_ = std::max(free_ - took, Clock::duration(0));
    next_ = free_.count() > 0 ? begin : begin + std::min(took * kOneIn, rarest_);
  }

 private:
  static constexpr int kOneIn = 1000;

  // Of this thread: what waits for a core costs nobody anything.
  static std::chrono::nanoseconds worked() {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  }

  Clock::duration rarest_;
  Clock::duration free_;  // what is left of it
  Clock::time_point next_;
};

}  // namespace tenure
