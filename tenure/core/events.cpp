#include <tenure/core/events.h>

#include <tenure/core/error.h>
#include <tenure/core/fast_tls.h>
#include <tenure/core/fork.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <mutex>

namespace tenure {
namespace {

// One producer, the thread; one consumer, the reader, under Rings::mutex.
class Ring {
 public:
  Ring(size_t capacity, uint64_t of_session)
      : session(of_session), slots_(capacity), mask_(capacity - 1) {}

  void push(const Event& event) {
    const auto head = head_.load(std::memory_order_relaxed);
    if (head - known_tail_ > mask_) {
      known_tail_ = tail_.load(std::memory_order_acquire);
      if (head - known_tail_ > mask_) {
        dropped.store(dropped.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        return;
      }
    }
    auto& slot = slots_[head & mask_];
    slot = event;
    slot.thread = thread;
    head_.store(head + 1, std::memory_order_release);
  }

  size_t drain(std::vector<Event>& out) {
    const auto tail = tail_.load(std::memory_order_relaxed);
    const auto head = head_.load(std::memory_order_acquire);
    for (auto at = tail; at != head; ++at) {
      out.push_back(slots_[at & mask_]);
    }
    tail_.store(head, std::memory_order_release);
    return head - tail;
  }

  const uint64_t session;
  const uint32_t thread = static_cast<uint32_t>(syscall(SYS_gettid));
  std::atomic<bool> thread_ended{false};
  std::atomic<uint64_t> dropped{0};

 private:
  std::vector<Event> slots_;
  const uint64_t mask_;
  uint64_t known_tail_ = 0;
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
};

struct Rings {
  std::mutex mutex;
  std::vector<std::shared_ptr<Ring>> rings;  // shared: a thread and the reader both use a ring
  size_t capacity = 0;
  uint64_t dropped_by_ended = 0;
  std::atomic<uint64_t> session{0};  // 0 while nobody reads; each reader has its own number
  uint64_t sessions = 0;

  Rings();
};

Rings& rings() {
  static auto* instance = new Rings;
  return *instance;
}

// A child has no reader: the parent's thread that drained did not come along.
void stop_in_child() {
  detail::events_on.store(false, std::memory_order_relaxed);
  rings().session.store(0, std::memory_order_relaxed);
}

Rings::Rings() {
  protect_across_fork(mutex);
  on_fork_in_child(stop_in_child);
}

TENURE_FAST_TLS Ring* this_ring = nullptr;
TENURE_FAST_TLS bool thread_over = false;

struct RingOwner {
  std::shared_ptr<Ring> ring;
  ~RingOwner() {
    this_ring = nullptr;
    thread_over = true;
    if (ring) {
      ring->thread_ended.store(true, std::memory_order_release);
    }
  }
};

thread_local RingOwner this_thread;

Ring* new_ring() {
  auto& all = rings();
  std::lock_guard lock(all.mutex);
  const auto session = all.session.load(std::memory_order_relaxed);
  if (session == 0 || thread_over) {
    return nullptr;
  }
  this_thread.ring = std::make_shared<Ring>(all.capacity, session);
  all.rings.push_back(this_thread.ring);
  this_ring = this_thread.ring.get();
  return this_ring;
}

// The thread's ring for the present reader; null when the reader has just gone.
Ring* current_ring() {
  auto* ring = this_ring;
  if (ring != nullptr && ring->session == rings().session.load(std::memory_order_acquire))
      [[likely]] {
    return ring;
  }
  return new_ring();
}

}  // namespace

namespace detail {

std::atomic<bool> events_on{false};

void append_event(const Event& event) {
  if (auto* ring = current_ring()) {
    ring->push(event);
  }
}

}  // namespace detail

EventReader::EventReader(size_t capacity) : generation_(fork_generation()) {
  auto& all = rings();
  std::lock_guard lock(all.mutex);
  if (all.session.load(std::memory_order_relaxed) != 0) {
    throw Error("events already have a reader: end it before starting another");
  }
  all.rings.clear();
  all.dropped_by_ended = 0;
  all.capacity = std::bit_ceil(capacity == 0 ? size_t{1} : capacity);
  all.session.store(++all.sessions, std::memory_order_release);
  detail::events_on.store(true, std::memory_order_release);
}

EventReader::~EventReader() {
  if (generation_ != fork_generation()) {
    return;  // inherited: this process may have a reader of its own by now
  }
  auto& all = rings();
  std::lock_guard lock(all.mutex);
  detail::events_on.store(false, std::memory_order_release);
  all.session.store(0, std::memory_order_release);
  all.rings.clear();
}

size_t EventReader::drain(std::vector<Event>& out) {
  auto& all = rings();
  std::unique_lock lock(all.mutex);
  const auto now = all.rings;
  lock.unlock();  // a thread's first event takes it
  size_t count = 0;
  std::vector<const Ring*> over;
  for (const auto& ring : now) {
    // Read before draining: an ended thread appends nothing after this.
    if (ring->thread_ended.load(std::memory_order_acquire)) {
      over.push_back(ring.get());
    }
    count += ring->drain(out);
  }
  lock.lock();
  std::erase_if(all.rings, [&](const auto& ring) {
    const bool ended = std::ranges::find(over, ring.get()) != over.end();
    all.dropped_by_ended += ended ? ring->dropped.load(std::memory_order_relaxed) : 0;
    return ended;
  });
  return count;
}

uint64_t EventReader::dropped() const {
  auto& all = rings();
  std::lock_guard lock(all.mutex);
  auto count = all.dropped_by_ended;
  for (const auto& ring : all.rings) {
    count += ring->dropped.load(std::memory_order_relaxed);
  }
  return count;
}

}  // namespace tenure
