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
  constexpr std::chrono::milliseconds shortest{2};
  Reading now;
  while (now.time - kStart.time < shortest) {
    std::this_thread::yield();
    now = Reading();
  }
  const std::chrono::duration<double> elapsed = now.time - kStart.time;
  return static_cast<double>(now.count - kStart.count) / elapsed.count();
}

}  // namespace

double seconds_between(uint64_t earlier, uint64_t later) {
  const auto difference = static_cast<int64_t>(later - earlier);
  return static_cast<double>(difference) / ticks_per_second();
}

}  // namespace tenure
