// Outgoing: storages whose copy to the host is under way, oldest first. Each is leased until its
// copy is done; a thread of its own notices that, so that memory returns to the allocator although
// the program does nothing. Or the compute stream is made to wait for the copy, and then the
// storage can go at once: whoever gets its memory next is behind that wait.
//
// Any thread may call.
#pragma once

#include <tenure/core/fence.h>
#include <tenure/core/lease.h>
#include <tenure/offload/own_thread.h>

#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <stop_token>

namespace tenure::offload {

class Outgoing {
 public:
  // `key` tells storages apart.
  struct Leaving {
    const void* key = nullptr;
    uint64_t bytes = 0;
    c10::Stream compute;  // that saved it
    size_t gone = 0;      // from this tick on we alone hold it
    bool needed = false;  // backward is about to use it: it stays
    Lease lease;
    Fence left;
  };

  Outgoing() = default;
  Outgoing(const Outgoing&) = delete;
  Outgoing& operator=(const Outgoing&) = delete;

  void add(Leaving leaving);
  // Until those that we alone hold at `tick` have at most `bytes`: `wait`s for the oldest on its
  // compute stream, and lets it go. What another thread is letting go is held until it has gone.
  void limit(int64_t bytes, size_t tick, const std::function<void(const Leaving&)>& wait);
  // Whether it is still here; then it is not let go by limit() until it is no longer needed.
  bool set_needed(const void* key, bool needed);
  bool has(const void* key) const;
  // Lets go what is done.
  void settle();
  uint64_t bytes() const;

 private:
  void watch(const std::stop_token& stop);

  mutable std::mutex mutex_;
  std::condition_variable_any added_;
  std::condition_variable_any ended_;
  std::deque<Leaving> leaving_;
  uint64_t bytes_ = 0;
  int64_t ending_ = 0;  // bytes that settle() is letting go, outside the lock
  OwnThread thread_;    // last: stops first
};

// The process is about to end: from here on no thread lets go of anything by itself, for a device
// or an interpreter that is ending can take nothing back. Waits for those that do now.
void stop_letting_go();

}  // namespace tenure::offload
