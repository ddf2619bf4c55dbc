// OwnThread: a thread that stops and is joined with its object, but not in a forked child, which
// has the object and not the thread.
#pragma once

#include <tenure/core/fork.h>

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

namespace tenure::offload {

class OwnThread {
 public:
  OwnThread() = default;
  // Runs `work(std::stop_token)`.
  template <class Work>
  explicit OwnThread(Work work) : thread_(std::make_unique<std::jthread>(std::move(work))) {}
  OwnThread(OwnThread&&) noexcept = default;
  OwnThread& operator=(OwnThread&& other) noexcept {
    forget_if_inherited();
    thread_ = std::move(other.thread_);
    process_ = other.process_;
    return *this;
  }
  OwnThread(const OwnThread&) = delete;
  OwnThread& operator=(const OwnThread&) = delete;
  ~OwnThread() { forget_if_inherited(); }

  // Whether it runs in this process.
  bool runs() const { return thread_ != nullptr && process_ == fork_generation(); }

 private:
  void forget_if_inherited() {
    if (process_ != fork_generation()) {
      (void)thread_.release();  // NOLINT(bugprone-unused-return-value)
    }
  }

  std::unique_ptr<std::jthread> thread_;
  uint32_t process_ = fork_generation();
};

}  // namespace tenure::offload
