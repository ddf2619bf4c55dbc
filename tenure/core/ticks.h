// Clocks that cost little. Ticks are the cycle counter's (7 ns where steady_clock takes 33), which
// on the machines we run on is constant-rate and synchronised between cores.
#pragma once

#include <cstdint>
#include <ctime>

#if defined(__x86_64__)
#include <x86intrin.h>
#elif !defined(__aarch64__)
#include <chrono>
#endif

namespace tenure {

inline uint64_t ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  uint64_t value = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
#else
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

// Nanoseconds of a clock that ticks every few milliseconds, and whose reading is a few loads. For
// ages that people read; nothing is ordered by it.
inline uint64_t coarse_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// Seconds between two readings of ticks(). The rate is measured against steady_clock from the first
// call of any function here, so early answers are a little less precise than late ones.
double seconds_between(uint64_t earlier, uint64_t later);
// The time of steady_clock at a reading of ticks().
int64_t nanoseconds_at(uint64_t reading);

}  // namespace tenure
