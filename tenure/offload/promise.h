// Promise: what a session tells whoever asks the parts of Tenure (core/part.h), for as long as this
// object lives: the budget that it keeps to ("bound_bytes"), and what it has displaced. Any thread.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace tenure::offload {

class Promise {
 public:
  using Displaced = std::function<int64_t(const c10::Device&)>;

  Promise(std::optional<uint64_t> budget, Displaced displaced);
  ~Promise();
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;

 private:
  const std::optional<uint64_t> budget_;
  const std::shared_ptr<const Displaced> displaced_;  // shared with askers whose call is in flight
};

}  // namespace tenure::offload
