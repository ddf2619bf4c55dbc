#include <tenure/core/ticks.h>

#include <chrono>
#include <thread>

namespace tenure {
namespace {

struct Reading {
  std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
  uint64_t count = ticks();
};

// Taken when the library is loaded, so that by the time anyone asks the base line is long.
const Reading kStart;

double ticks_per_second() {
#if defined(__aarch64__)
  uint64_t value = 0;
  asm("mrs %0, cntfrq_el0" : "=r"(value));
  return static_cast<double>(value);
#else
  constexpr std::chrono::milliseconds shortest{2};
  Reading now;
  while (now.time - kStart.time < shortest) {
    std::this_thread::yield();
    now = Reading();
  }
  const std::chrono::duration<double> elapsed = now.time - kStart.time;
  return static_cast<double>(now.count - kStart.count) / elapsed.count();
#endif
}

}  // namespace

double seconds_between(uint64_t earlier, uint64_t later) {
  const auto difference = static_cast<int64_t>(later - earlier);
  return static_cast<double>(difference) / ticks_per_second();
}

int64_t nanoseconds_at(uint64_t reading) {
  // Once and for all, so that what was read in order stays in order.
  static const double rate = 1e9 / ticks_per_second();
  const std::chrono::nanoseconds start = kStart.time.time_since_epoch();
  const auto since = static_cast<double>(static_cast<int64_t>(reading - kStart.count));
  return start.count() + static_cast<int64_t>(since * rate);
}

}  // namespace tenure
