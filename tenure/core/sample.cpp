#include <tenure/core/sample.h>

#include <tenure/core/error.h>
#include <tenure/core/kernel_file.h>
#include <tenure/core/latest.h>
#include <tenure/core/pace.h>
#include <tenure/core/quiet_thread.h>
#include <tenure/core/text.h>

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <ranges>
#include <stop_token>
#include <thread>
#include <utility>

namespace tenure {
namespace {

using SteadyClock = std::chrono::steady_clock;

struct Walk {
  MappedSample mapped;
  SteadyClock::time_point begin;
};

// The soft limit, if there is one.
std::optional<int64_t> limit_of(__rlimit_resource_t resource) {
  rlimit found{};
  if (::getrlimit(resource, &found) != 0 || found.rlim_cur == RLIM_INFINITY) {
    return std::nullopt;
  }
  return static_cast<int64_t>(found.rlim_cur);
}

// The files of one process. Opened by the process itself, for /proc/self means the opener.
struct Files {
  KernelFile status{"/proc/self/status"};
  KernelFile meminfo{"/proc/meminfo"};
  KernelFile rollup{"/proc/self/smaps_rollup"};
  std::optional<MemoryCgroup> cgroup = MemoryCgroup::of_this_process();

  void close() {
    status = {};
    meminfo = {};
    rollup = {};
    cgroup.reset();
  }

  [[nodiscard]] ProcessSample read() const {
    ProcessSample out;
    std::array<char, 4096> buffer{};
    auto text = status.read(buffer);
    out.rss = bytes_after("VmRSS:", text).value_or(0);
    out.virtual_size = bytes_after("VmSize:", text).value_or(0);
    out.virtual_limit = limit_of(RLIMIT_AS);
    out.data = bytes_after("VmData:", text);
    out.data_limit = limit_of(RLIMIT_DATA);
    out.peak_rss = bytes_after("VmHWM:", text);
    out.shared = bytes_after("RssShmem:", text);
    out.files = bytes_after("RssFile:", text);
    out.swap = bytes_after("VmSwap:", text);
    text = meminfo.read(buffer);
    out.host_total = bytes_after("MemTotal:", text);
    out.host_available = bytes_after("MemAvailable:", text);
    if (cgroup) {
      out.cgroup = cgroup->sample();
    }
    return out;
  }

  // What the whole process maps. Some sandboxes have no smaps_rollup: nullopt.
  [[nodiscard]] std::optional<Walk> walk() const {
    const auto begin = SteadyClock::now();
    std::array<char, 2048> buffer{};
    const auto text = rollup.read(buffer);
    const auto pss = bytes_after("Pss:", text);
    const auto rss = bytes_after("Rss:", text);
    if (!pss || !rss) {
      return std::nullopt;
    }
    Walk out;
    out.begin = begin;
    out.mapped.pss = *pss;
    out.mapped.pss_file = bytes_after("Pss_File:", text);
    out.mapped.rss = *rss;
    return out;
  }

  void read_group(MappedSample& out) const {
    if (cgroup) {
      out.cgroup_inactive_file = cgroup->inactive_file();
      std::array<char, 4096> figures{};
      const auto mine = bytes_after("RssShmem:", status.read(figures)).value_or(0);
      if (const auto all = cgroup->shared()) {
        out.cgroup_files_in_memory = std::max(*all - mine, int64_t{0});
      }
    }
  }
};

// For a walk the kernel goes through all pages of the process, some 7 ms a gigabyte. Nothing that
// is judged or forecast is made of it, so it may become rare. The group's figures are part of both.
constexpr std::chrono::minutes kRarestWalk{5};
constexpr std::chrono::seconds kRarestGroup{30};

class Counted {
 public:
  explicit Counted(std::atomic<uint32_t>& count) : count_(count) { ++count_; }
  ~Counted() { --count_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<uint32_t>& count_;
};

}  // namespace

// All that belongs to one process. `asks` and `thread` change under `control`, which is held while
// a thread is joined; the thread itself takes only `wake`.
struct Sampler::State {
  explicit State(std::atomic<uint32_t>& counted) : users(counted) {}

  std::atomic<uint32_t>& users;  // of the sampler
  const pid_t pid = ::getpid();
  Files files;
  Latest<Walk> latest;

  std::mutex control;
  std::map<uint64_t, std::chrono::milliseconds> asks;
  uint64_t next_id = 1;
  bool retired = false;

  std::mutex wake;
  std::condition_variable_any woken;
  std::chrono::milliseconds period{0};

  std::jthread thread;  // last: it uses all of the above

  [[nodiscard]] bool inherited() const { return pid != ::getpid(); }

  // 0: it is not in use any more.
  uint64_t add(std::chrono::milliseconds asked) {
    const std::lock_guard lock(control);
    if (retired) {
      return 0;
    }
    asks.emplace(next_id, asked);
    apply();
    return next_id++;
  }

  void remove(uint64_t id) {
    const std::lock_guard lock(control);
    asks.erase(id);
    apply();
  }

  void stop() {
    const std::lock_guard lock(control);
    asks.clear();
    apply();
  }

 private:
  // REQUIRES: `control` is held.
  void apply() {
    if (asks.empty()) {
      thread = {};  // asks it to stop and joins
      return;
    }
    const auto shortest = std::ranges::min(asks | std::views::values);
    {
      const std::lock_guard lock(wake);
      period = shortest;
    }
    woken.notify_all();
    if (!thread.joinable()) {
      start();
    }
  }

  void start() {
    try {
      thread =
          quiet_thread("the sampler's thread", [this](const std::stop_token& stop) { run(stop); });
    } catch (...) {
      asks.clear();
      throw;
    }
  }

  void run(const std::stop_token& stop) {
    ::pthread_setname_np(::pthread_self(), "tenure-sampler");
    Pace walks(kRarestWalk);
    Pace groups(kRarestGroup);
    std::optional<Walk> walk;
    MappedSample group;
    while (!stop.stop_requested()) {
      if (walks.is_due()) {
        walks.run([&] { walk = files.walk(); });
      }
      if (groups.is_due()) {
        groups.run([&] { files.read_group(group); });
      }
      if (walk) {
        walk->mapped.cgroup_inactive_file = group.cgroup_inactive_file;
        walk->mapped.cgroup_files_in_memory = group.cgroup_files_in_memory;
        latest.publish(*walk);
      }
      std::unique_lock lock(wake);
      const auto slept = period;
      woken.wait_for(lock, stop, slept, [&] { return period < slept; });
    }
  }
};

Sampler::Sampler() : state_(new State(users_)) {}

Sampler::~Sampler() {
  State* state = state_.load(std::memory_order_acquire);
  if (state != nullptr && state->inherited()) {
    state->files.close();
    return;  // the rest is the parent's: its thread does not exist here and cannot be joined
  }
  delete state;
}

Sampler& Sampler::shared() {
  static auto* instance = [] {
    auto* sampler = new Sampler;
    std::atexit([] {
      const Counted use(shared().users_);
      State* state = shared().state_.load(std::memory_order_acquire);
      if (state != nullptr && !state->inherited()) {
        state->stop();
      }
    });
    return sampler;
  }();
  return *instance;
}

Sampler::State& Sampler::state() const {
  State* current = state_.load();
  if (current != nullptr && !current->inherited()) [[likely]] {
    return *current;
  }
  auto* own = new State(users_);
  while (!state_.compare_exchange_strong(current, own)) {
    if (current != nullptr && !current->inherited()) {
      delete own;  // another thread of this process was first
      return *current;
    }
  }
  if (current != nullptr) {
    current->files.close();
  }
  return *own;
}

Sample Sampler::sample() const {
  const Counted use(users_);
  const State& own = state();
  Sample out{own.files.read(), std::nullopt, sample_devices()};
  if (!out.devices.empty()) {
    out.pinned = sample_pinned(out.devices.front().device.type());
  }
  if (auto walk = own.latest.read()) {
    walk->mapped.age = SteadyClock::now() - walk->begin;
    out.process.mapped = walk->mapped;
  }
  return out;
}

Sampler::Refresh Sampler::refresh(std::chrono::duration<double> period) {
  using namespace std::chrono_literals;
  if (!(period >= 1ms && period <= 24h)) {  // so that not-a-number is refused too
    throw InputError(
        text("samples can be refreshed every 1 ms to every day, not every ", period.count(), " s"));
  }
  const auto asked = std::chrono::duration_cast<std::chrono::milliseconds>(period);
  const Counted use(users_);
  for (;;) {
    State& own = state();
    if (const auto id = own.add(asked); id != 0) {
      return {own, id};
    }
  }
}

void Sampler::rest() {
  using namespace std::chrono_literals;
  const std::unique_lock alone(resting_, std::try_to_lock);
  State* current = state_.load();
  if (!alone || current == nullptr || current->inherited()) {
    return;
  }
  {
    const std::lock_guard lock(current->control);
    if (!current->asks.empty() || current->retired) {
      return;
    }
    current->retired = true;
    state_.store(nullptr);
  }
  // Who comes from now on finds a new state, so those who may still use this one only get fewer.
  for (const auto until = SteadyClock::now() + 100ms; users_.load() != 0;) {
    if (SteadyClock::now() > until) {
      return;  // in a child that was forked during a sample, say
    }
    std::this_thread::yield();
  }
  delete current;
}

Sampler::Refresh::Refresh(State& state, uint64_t id) : state_(&state), id_(id) {}

Sampler::Refresh::Refresh(Refresh&& other) noexcept
    : state_(std::exchange(other.state_, nullptr)), id_(other.id_) {}

Sampler::Refresh& Sampler::Refresh::operator=(Refresh&& other) noexcept {
  std::swap(state_, other.state_);
  std::swap(id_, other.id_);
  return *this;
}

Sampler::Refresh::~Refresh() {
  if (state_ != nullptr && !state_->inherited()) {
    const Counted use(state_->users);  // once removed, it may rest
    state_->remove(id_);
  }
}

}  // namespace tenure
