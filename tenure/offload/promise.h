// Promise: the budget that a session keeps to, told to whoever asks the parts of Tenure
// ("bound_bytes" of core/part.h) for as long as this object lives. Any thread.
#pragma once

#include <cstdint>

namespace tenure::offload {

class Promise {
 public:
  explicit Promise(uint64_t budget);
  ~Promise();
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;

 private:
  const uint64_t budget_;
};

}  // namespace tenure::offload
