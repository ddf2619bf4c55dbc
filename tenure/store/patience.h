// Patience: how long an owner is waited for where its answer only saves a copy: about as long as
// the copy takes. One that did not answer in that time is not asked again for a while. Torch-free.
// Threading: any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace tenure::store {

class Patience {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Until when an answer is worth its wait that saves a copy of `bytes`. None: it is not asked.
  std::optional<Time> until(uint64_t owner, uint64_t bytes);
  // It did not answer by then.
  void ran_out(uint64_t owner);

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, Time> silent_;  // until when it is not asked
};

}  // namespace tenure::store
