#include <tenure/offload/outgoing.h>

#include <tenure/core/fork.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

namespace tenure::offload {
namespace {

// How late memory may return while the program is idle. Copies take longer than this, and a look
// costs a microsecond.
constexpr auto kLook = std::chrono::milliseconds(1);

// For how long another thread is waited for that lets go. It takes microseconds, unless a deleter
// needs the GIL and our caller has it.
constexpr auto kLetsGoWithin = std::chrono::milliseconds(100);

std::atomic<bool> g_process_ends = false;
std::atomic<int> g_letting_go = 0;  // threads

struct LettingGo {
  LettingGo() {
    // A forked child does not have the threads.
    [[maybe_unused]] static const bool once = [] {
      on_fork_in_child([] { g_letting_go = 0; });
      return true;
    }();
    ++g_letting_go;
  }
  ~LettingGo() {
    --g_letting_go;
    g_letting_go.notify_all();
  }
  LettingGo(const LettingGo&) = delete;
  LettingGo& operator=(const LettingGo&) = delete;
};

}  // namespace

void Outgoing::add(Leaving leaving) {
  std::lock_guard lock(mutex_);
  bytes_ += leaving.bytes;
  leaving_.push_back(std::move(leaving));
  if (!thread_.runs()) {
    thread_ = OwnThread([this](const std::stop_token& stop) { watch(stop); });
  }
  added_.notify_one();
}

void Outgoing::limit(int64_t bytes, size_t tick, const std::function<void(const Leaving&)>& wait) {
  std::vector<Leaving> ending;  // freed outside the lock: a deleter may take the GIL
  std::unique_lock lock(mutex_);
  const auto most = std::max<int64_t>(bytes, 0);
  const auto ours = [&](const Leaving& leaving) {
    return leaving.gone <= tick && !leaving.needed ? static_cast<int64_t>(leaving.bytes) : 0;
  };
  int64_t all = 0;
  for (const auto& leaving : leaving_) {
    all += ours(leaving);
  }
  for (auto it = leaving_.begin(); it != leaving_.end() && all > most;) {
    if (it->needed) {
      ++it;
      continue;
    }
    wait(*it);
    all -= ours(*it);
    bytes_ -= it->bytes;
    ending.push_back(std::move(*it));
    it = leaving_.erase(it);
  }
  ended_.wait_for(lock, kLetsGoWithin, [&] { return all + ending_ <= most; });
}

bool Outgoing::set_needed(const void* key, bool needed) {
  std::lock_guard lock(mutex_);
  const auto it = std::ranges::find(leaving_, key, &Leaving::key);
  if (it == leaving_.end()) {
    return false;
  }
  it->needed = needed;
  return true;
}

bool Outgoing::has(const void* key) const {
  std::lock_guard lock(mutex_);
  return std::ranges::find(leaving_, key, &Leaving::key) != leaving_.end();
}

void Outgoing::settle() {
  std::vector<Leaving> ending;
  int64_t bytes = 0;
  std::unique_lock lock(mutex_);
  while (!leaving_.empty() && leaving_.front().left.ready()) {
    bytes_ -= leaving_.front().bytes;
    bytes += static_cast<int64_t>(leaving_.front().bytes);
    ending.push_back(std::move(leaving_.front()));
    leaving_.pop_front();
  }
  ending_ += bytes;
  lock.unlock();
  ending.clear();
  lock.lock();
  ending_ -= bytes;
  ended_.notify_all();
}

uint64_t Outgoing::bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

void Outgoing::watch(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    {
      std::unique_lock lock(mutex_);
      added_.wait(lock, stop, [this] { return !leaving_.empty(); });
      added_.wait_for(lock, stop, kLook, [] { return false; });
    }
    const LettingGo now;
    if (g_process_ends) {
      return;
    }
    try {
      settle();
    } catch (const c10::Error&) {
      return;  // the device has failed: the thread that uses it hears of that, with a traceback
    }
  }
}

void stop_letting_go() {
  g_process_ends = true;
  for (auto threads = g_letting_go.load(); threads != 0; threads = g_letting_go.load()) {
    g_letting_go.wait(threads);
  }
}

}  // namespace tenure::offload
