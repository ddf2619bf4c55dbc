// Pace: since when a message comes without much of it having come. One that comes byte by byte
// would keep a place for as long as it likes. What goes out needs none: a socket that is full takes
// more only when much of it was read. Threading: the holder's. Torch-free.
#pragma once

#include <chrono>
#include <cstdint>

namespace tenure::store {

inline constexpr uint64_t kPaceBytes = 1 << 20;  // or all of the message,
inline constexpr int64_t kPaceStalls = 4;        // in so many times that which a byte has

class Pace {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void begin(Time now) {
    begun_ = now;
    bytes_ = 0;
  }
  void moved(uint64_t bytes, Time now) {
    bytes_ += bytes;
    if (bytes_ >= kPaceBytes) {
      begin(now);
    }
  }
  [[nodiscard]] Time begun() const { return begun_; }

 private:
  Time begun_;
  uint64_t bytes_ = 0;
};

}  // namespace tenure::store
