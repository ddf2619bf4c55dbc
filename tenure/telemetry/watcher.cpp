#include <tenure/telemetry/watcher.h>

#include <tenure/core/fork.h>
#include <tenure/core/quiet_thread.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace tenure::telemetry {

using namespace std::chrono_literals;
using std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

namespace {

constexpr auto kLook = 500ms;  // between two looks at the file
constexpr auto kPatience = 2s;
// A wait that ends without its key writes warnings to stderr, so it does not end. poll(2) takes
// its time in milliseconds as an int, which is 24 days.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 20);
constexpr const char* kClosed = "closed";

std::string read_file(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    return {};
  }
  std::array<char, 1 << 16> buffer;
  // NOLINTNEXTLINE(clang-analyzer-unix.BlockInCriticalSection): no lock is held where it is called
  const auto got = read(file, buffer.data(), buffer.size());
  close(file);
  return got > 0 ? std::string(buffer.data(), static_cast<size_t>(got)) : std::string();
}

// Best effort: it is the second way.
void write_file(const std::string& path, const std::string& text, uint32_t rank) {
  const auto beside = path + "." + std::to_string(rank);
  const int file = open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) {
    return;
  }
  const bool written = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(file);
  if (!written || std::rename(beside.c_str(), path.c_str()) != 0) {
    unlink(beside.c_str());
  }
}

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

struct Watcher::State {
  State(Options all, Heard call) : options(std::move(all)), heard(std::move(call)) {}

  // Rounds are numbered: a key that was set stays set.
  std::string key(uint64_t number, uint32_t rank) const {
    return options.prefix + "/" + std::to_string(number) + "/" + std::to_string(rank);
  }
  std::string claim(uint64_t number) const {
    return options.prefix + "/" + std::to_string(number) + "/by";
  }

  void hear(const std::string& text);
  void wait_for_rounds();
  bool connect();
  void hear_rounds();
  void tell_and_look();
  StorePtr connected(std::chrono::milliseconds patience);
  bool tell_now(const std::string& text);
  void tell_late();
  std::optional<bool> tell_through_store(c10d::Store& through, const std::string& text);

  const Options options;
  StorePtr store;  // the job's

  StorePtr waiting_store;           // a clone, the waiting thread's
  uint64_t told_rounds = 0;         // the telling thread's, as is the next one
  std::optional<std::string> late;  // what the file alone says, until there is a store

  std::mutex hearing;  // held while `heard` runs, so that it runs once at a time
  Heard heard;
  std::set<std::string> known;  // texts that were heard or told

  std::mutex mutex;
  std::condition_variable changed;
  bool closing = false;
  bool connecting = false;
  StorePtr telling_store;  // a clone, used by the telling thread alone
  uint64_t round = 0;      // the next one to hear of
  std::optional<std::string> to_tell;
  std::optional<bool> first;  // what came of it
  int running = 0;

  std::shared_ptr<State> self;  // in a child that leaves all this alone
};

void Watcher::State::hear(const std::string& text) {
  const std::lock_guard lock(hearing);
  if (heard && !text.empty() && known.insert(text).second) {
    heard(text);
  }
}

void Watcher::State::wait_for_rounds() {
  pthread_setname_np(pthread_self(), "tenure-watcher");
  if (connect()) {
    hear_rounds();
  }
  const std::lock_guard lock(mutex);
  --running;
  changed.notify_all();
}

// Both clones are made here: a thousand ranks that connect at once wait for seconds, and a host
// that has gone is waited for until the store's own timeout, while the file must be looked at.
// Whether there is a store to wait on.
bool Watcher::State::connect() {
  StorePtr made;
  try {
    made = store->clone();
    made->setTimeout(kPatience);
  } catch (const std::exception&) {
    made.reset();  // its host has gone: the file is what is left
  }
  {
    const std::lock_guard lock(mutex);
    telling_store = made;
    connecting = false;
    changed.notify_all();
    if (!made || closing) {
      return false;  // nobody would wake a thread that waits
    }
  }
  try {
    waiting_store = store->clone();
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

void Watcher::State::hear_rounds() {
  while (true) {
    const auto mine = key(round, options.rank);  // this thread alone changes `round`
    const auto began = steady_clock::now();
    try {
      waiting_store->wait({mine}, kForever);
      const auto got = waiting_store->get(mine);
      const std::string text(got.begin(), got.end());
      if (text == kClosed) {
        return;
      }
      {
        const std::lock_guard lock(mutex);
        ++round;
      }
      hear(text);
    } catch (const std::exception&) {
      if (steady_clock::now() - began < kForever) {
        return;  // the store's host has gone: the file is what is left
      }
    }
  }
}

// The store to tell through, if there is one by then.
StorePtr Watcher::State::connected(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex);
  changed.wait_for(lock, patience, [&] { return !connecting || closing; });
  return telling_store;
}

void Watcher::State::tell_and_look() {
  pthread_setname_np(pthread_self(), "tenure-telling");
  std::unique_lock lock(mutex);
  while (!closing) {
    changed.wait_for(lock, kLook, [&] { return closing || to_tell; });
    if (to_tell) {
      const auto text = std::exchange(to_tell, std::nullopt).value_or("");
      lock.unlock();
      const bool was_first = tell_now(text);
      lock.lock();
      first = was_first;
      changed.notify_all();
      continue;
    }
    lock.unlock();
    hear(read_file(options.file));
    tell_late();
    lock.lock();
  }
  const auto mine = key(round, options.rank);
  const auto last = telling_store;
  lock.unlock();
  if (last) {
    try {
      last->set(mine, bytes_of(kClosed));
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch) then nobody waits for it
    }
  }
  lock.lock();
  --running;
  changed.notify_all();
}

void Watcher::State::tell_late() {
  if (const auto through = late ? connected(0ms) : StorePtr()) {
    tell_through_store(*through, std::exchange(late, std::nullopt).value_or(""));
  }
}

bool Watcher::State::tell_now(const std::string& text) {
  bool others_told = false;
  const auto there = read_file(options.file);
  {
    const std::lock_guard lock(hearing);
    others_told = !there.empty() && !known.contains(there);
    known.insert(text);
  }
  if (const auto through = connected(kPatience / 2)) {
    others_told = !tell_through_store(*through, text).value_or(!others_told);
  } else {
    late = text;
  }
  if (others_told) {
    return false;
  }
  if (options.ranks > 1) {
    write_file(options.file, text, options.rank);
  }
  return true;
}

// Whether no other rank has claimed the round; nothing if the store's host has gone.
std::optional<bool> Watcher::State::tell_through_store(c10d::Store& through,
                                                       const std::string& text) try {
  uint64_t now = 0;
  {
    const std::lock_guard lock(mutex);
    now = round;
  }
  const auto me = bytes_of(std::to_string(options.rank));
  // A round of our own that our other thread has not heard of yet is over.
  now = std::max(now, told_rounds);
  if (through.compareSet(claim(now), bytes_of(""), me) != me) {
    return false;
  }
  told_rounds = now + 1;
  std::vector<std::string> keys;
  for (uint32_t rank = 0; rank < options.ranks; ++rank) {
    keys.push_back(key(now, rank));
  }
  if (through.hasExtendedApi()) {
    through.multiSet(keys, std::vector(keys.size(), bytes_of(text)));
    return true;
  }
  for (const auto& one : keys) {
    through.set(one, bytes_of(text));
  }
  return true;
} catch (const std::exception&) {
  const std::lock_guard lock(mutex);
  telling_store.reset();
  return std::nullopt;
}

Watcher::Watcher(const StorePtr& store, Options options, Heard heard)
    : state_(std::make_shared<State>(std::move(options), std::move(heard))),
      generation_(fork_generation()) {
  state_->known.insert(read_file(state_->options.file));
  if (store) {
    state_->store = store;
    state_->connecting = true;
    state_->running = 1;
    waiting_ = std::make_unique<std::jthread>(
        quiet_thread("the watcher's thread", [state = state_] { state->wait_for_rounds(); }));
  }
  {
    const std::lock_guard lock(state_->mutex);
    ++state_->running;
  }
  telling_ = std::make_unique<std::jthread>(
      quiet_thread("the watcher's thread", [state = state_] { state->tell_and_look(); }));
}

bool Watcher::tell(std::string text) {
  std::unique_lock lock(state_->mutex);
  state_->first.reset();
  state_->to_tell = std::move(text);
  state_->changed.notify_all();
  state_->changed.wait_for(lock, kPatience, [&] { return state_->first || state_->closing; });
  return state_->first.value_or(true);
}

void Watcher::close() {
  if (!telling_ || generation_ != fork_generation()) {
    return;
  }
  {
    // No more is heard: a call that is under way ends first.
    const std::lock_guard lock(state_->hearing);
    state_->heard = {};
  }
  std::unique_lock lock(state_->mutex);
  state_->closing = true;
  state_->changed.notify_all();
  const bool ended =
      state_->changed.wait_for(lock, kPatience, [&] { return state_->running == 0; });
  lock.unlock();
  if (!ended) {
    // Stuck in a call to a host that does not answer, which nothing can interrupt.
    [[maybe_unused]] auto* left = waiting_.release();
    [[maybe_unused]] auto* also = telling_.release();
  }
  waiting_.reset();
  telling_.reset();
}

Watcher::~Watcher() {
  if (generation_ != fork_generation()) {
    [[maybe_unused]] auto* parents = waiting_.release();
    [[maybe_unused]] auto* also = telling_.release();
    auto& state = *state_;
    state.self = std::move(state_);  // nor are the stores this process's to close
    return;
  }
  close();
}

}  // namespace tenure::telemetry
