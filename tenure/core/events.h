// Events: what happened to leases, scopes and storages, as fixed-size records in a ring per
// thread. Appending never blocks, allocates only at a thread's first event, and never takes the
// GIL; a full ring drops the event and counts it. While no reader exists nothing is recorded and
// an append costs one load.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tenure {

enum class EventType : uint16_t {
  lease_taken = 1,
  lease_released,
  lease_moved,
  scope_opened,
  scope_closed,
  storage_released,
  storage_refilled,
  step,
};

struct alignas(64) Event {
  uint64_t ticks = 0;
  uint64_t storage = 0;  // the ledger's id of the storage, never reused
  uint64_t bytes = 0;
  uint64_t scope = 0;
  uint32_t owner = 0;
  uint32_t thread = 0;  // kernel thread id, filled in by append
  EventType type{};
  uint16_t device = 0;
  uint32_t name = 0;
  uint64_t value = 0;  // step number, scope counter
  uint64_t reserved = 0;
};
static_assert(sizeof(Event) == 64);

namespace detail {
extern std::atomic<bool> events_on;
void append_event(const Event& event);
}  // namespace detail

inline bool events_on() { return detail::events_on.load(std::memory_order_relaxed); }

inline void append(const Event& event) {
  if (events_on()) {
    detail::append_event(event);
  }
}

// Turns recording on for as long as it lives. One at a time: a second one throws Error. Its methods
// belong to one thread; producers go on appending while it drains.
class EventReader {
 public:
  // Each thread's ring holds `capacity` events, rounded up to a power of two.
  explicit EventReader(size_t capacity = size_t{1} << 13);
  ~EventReader();
  EventReader(const EventReader&) = delete;
  EventReader& operator=(const EventReader&) = delete;

  // Appends all events recorded so far, in order within a thread, and returns how many.
  size_t drain(std::vector<Event>& out);

  // Events lost since this reader began because a ring was full.
  uint64_t dropped() const;

 private:
  uint32_t generation_;
};

}  // namespace tenure
