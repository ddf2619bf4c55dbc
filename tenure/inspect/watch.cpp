#include <tenure/inspect/watch.h>

#include <tenure/core/clock.h>
#include <tenure/core/fork.h>
#include <tenure/core/pace.h>
#include <tenure/core/part.h>
#include <tenure/core/sample.h>
#include <tenure/core/ticks.h>
#include <tenure/inspect/children.h>
#include <tenure/inspect/kept_heap.h>

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <stop_token>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace tenure::inspect {
namespace {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

constexpr size_t kMostRows = 4096;
constexpr uint64_t kFirstDue = 12;  // steps
constexpr auto kWriteEvery = 250ms;
constexpr auto kLookEvery = 200ms;   // for children, at most
constexpr auto kFreeLooks = 10ms;    // in the beginning, when most of them begin
constexpr double kCutShare = 0.005;  // of the wall time may go to cuts that are not due
constexpr double kChildrenShare = 0.003;
constexpr auto kRarestLook = 30s;    // a verdict has their growth in it
constexpr uint64_t kHeapSteps = 64;  // malloc, which walks its free blocks, is asked so often, and
                                     // again each time that the steps double

StepRow sampled_row(uint64_t step, double seconds, const Sample& sample) {
  StepRow row;
  row.step = step;
  row.seconds = seconds;
  row.rss = sample.process.rss;
  row.files = sample.process.files;
  row.shared = sample.process.shared;
  if (sample.process.mapped) {
    row.pss = sample.process.mapped->pss;
    row.in_memory = sample.process.mapped->cgroup_files_in_memory;
  }
  if (sample.process.cgroup) {
    row.cgroup = sample.process.cgroup->usage;
  }
  if (sample.pinned) {
    row.pinned = sample.pinned->reserved.current;
  }
  for (const auto& device : sample.devices) {
    if (device.allocator) {
      row.device_reserved = row.device_reserved.value_or(0) + device.allocator->reserved.current;
      row.device_allocated = row.device_allocated.value_or(0) + device.allocator->allocated.current;
    }
    if (device.driver) {
      row.device_used = row.device_used.value_or(0) + device.driver->total - device.driver->free;
    }
  }
  return row;
}

// In RAM or swapped out, no file and not shared.
int64_t own_bytes(const ProcessSample& process) {
  return process.rss - process.files.value_or(0) - process.shared.value_or(0) +
         process.swap.value_or(0);
}

std::vector<Figure> figures_at(uint64_t step) {
  std::vector<Figure> out;
  for (const auto& part : parts()) {
    if (part->stats) {
      for (auto& [name, value] : part->stats()) {
        out.push_back({step, part->name, std::move(name), value});
      }
    }
  }
  return out;
}

}  // namespace

struct Watch::State {
  explicit State(WatchOptions given) : options(std::move(given)) {
    if (!options.path.empty()) {
      recording = std::make_unique<Recording>(options.path, options.cap, options.redact);
      for (const auto& [key, value] : options.meta) {
        recording->put(key, value);
      }
    }
  }

  double seconds() const {
    return std::chrono::duration<double>(SteadyClock::now() - began).count();
  }

  void end_step(uint64_t step) {
    const auto begin = SteadyClock::now();
    auto figures = options.path.empty() ? std::vector<Figure>() : figures_at(step);
    const auto sample = Sampler::shared().sample();
    auto row = sampled_row(step, seconds(), sample);
    observer().sweep();
    if (row.shared) {
      row.shared = std::max<int64_t>(0, *row.shared - observer().shared_bytes());
    }
    const auto all_pinned = row.pinned.value_or(0);
    if (row.pinned) {
      row.pinned = std::max<int64_t>(0, *row.pinned - observer().pinned_bytes());
    }
    auto& births = observer().births();
    const auto flow = births.flow();
    births.start_interval();
    observer().set_step(step + 1);
    row.held = flow.bytes;
    row.peak = flow.peak;
    std::lock_guard lock(mutex);
    row.births = flow.births - last.births;
    row.born_bytes = flow.born_bytes - last.born_bytes;
    row.deaths = flow.deaths - last.deaths;
    last = flow;
    const auto arenas = observer().interpreter_bytes();
    if (steps % (steps / kHeapSteps + 1) == 0) {
      const auto heap = mallinfo2();
      heap_bytes = static_cast<int64_t>(heap.uordblks + heap.hblkhd);
      heap_free = static_cast<int64_t>(heap.fordblks);
      if (observer().storages_are_malloced()) {  // else most of the process is another allocator's
        heap_free = kept_heap.resident(heap_bytes, heap_free, own_bytes(sample.process) - arenas);
      }
      heap_held = observer().malloced_bytes() + cached.load(std::memory_order_relaxed);
    }
    row.heap = std::max<int64_t>(0, heap_bytes - heap_held + arenas);
    row.heap_free = heap_free;
    if (!observer().storages_are_malloced()) {
      const auto on_host = flow.bytes - observer().device_bytes() - observer().shared_bytes() -
                           observer().pinned_bytes() - observer().malloced_bytes();
      row.reserve = std::max<int64_t>(0, row.rss - row.files.value_or(0) - heap_bytes - heap_free -
                                             arenas - all_pinned - std::max<int64_t>(0, on_host));
    }
    if (!children.empty() && children_time <= row.seconds * kChildrenShare) {
      const auto asked = SteadyClock::now();
      children_bytes = private_bytes(children);
      children_time += std::chrono::duration<double>(SteadyClock::now() - asked).count();
    }
    row.children = children_bytes;
    if (!alone) {
      row.in_memory.reset();  // they may be somebody else's
    }
    rows.push_back(row);
    ++steps;
    queued_rows.push_back(row);
    std::ranges::move(figures, std::back_inserter(queued_figures));
    if (rows.size() > kMostRows) {
      thin_rows();
    }
    if (steps >= next_due || cut_time < seconds() * kCutShare) {
      take_cut(step);
    }
    spent += SteadyClock::now() - begin;
  }

  void clock_ticked(uint64_t step) {
    {
      std::lock_guard lock(mutex);
      if (!ticking && steps > 0) {
        // Until now intervals of time stood in for steps, whose numbers begin anew.
        rows.clear();
        queued_rows.clear();
        queued_figures.clear();
        cuts.clear();
        queued_cuts.clear();
        steps = 0;
        next_due = kFirstDue;
        observer().births().restart_steps();
        forget_steps = true;
      }
      ticking = true;
    }
    end_step(step);
  }

  // Every other one of the older half: the rows stay in order and cover the whole run.
  void thin_rows() {
    std::vector<StepRow> kept;
    std::unordered_set<uint64_t> gone;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i % 2 == 0 || i > rows.size() / 2) {
        kept.push_back(rows[i]);
      } else {
        gone.insert(rows[i].step);
      }
    }
    rows = std::move(kept);
    for (auto& [origin, series] : cuts) {
      std::erase_if(series, [&](const Cut& cut) { return gone.contains(cut.step); });
    }
  }

  // REQUIRES: mutex.
  void take_cut(uint64_t step) {
    if (observer().level() < Level::trace) {
      return;
    }
    const auto begin = SteadyClock::now();
    struct Sum {
      int64_t bytes = 0, count = 0;
      std::unordered_set<uint32_t> births;
    };
    std::unordered_map<uint32_t, Sum> sums;
    for (const auto& birth : observer().births().alive()) {
      auto& sum = sums[static_cast<uint32_t>(birth.origin)];
      sum.bytes += static_cast<int64_t>(birth.bytes);
      ++sum.count;
      sum.births.insert(birth.step);
    }
    // An origin of which nothing is left any more ends with a zero.
    for (const auto& [origin, series] : cuts) {
      sums.try_emplace(static_cast<uint32_t>(origin));
    }
    for (const auto& [origin, sum] : sums) {
      auto& series = cuts[OriginId{origin}];
      Cut cut{step, OriginId{origin}, sum.bytes, sum.count,
              static_cast<int64_t>(sum.births.size())};
      const bool same = series.size() >= 2 && series.back().bytes == cut.bytes &&
                        series.back().count == cut.count &&
                        series[series.size() - 2].bytes == cut.bytes;
      if (same) {
        series.back() = cut;  // a level stretch is its two ends
      } else {
        series.push_back(cut);
      }
      queued_cuts.push_back(cut);
    }
    cut_time += std::chrono::duration<double>(SteadyClock::now() - begin).count();
  }

  void run(const std::stop_token& stop) {
    std::stop_callback wake_up(stop, [this] { wake.notify_one(); });
    auto next_write = SteadyClock::now() + kWriteEvery;
    Pace looks(kRarestLook, kFreeLooks);
    auto next_children = SteadyClock::now();
    while (!stop.stop_requested()) {
      {
        std::unique_lock lock(mutex);
        wake.wait_until(lock, std::min(next_write, next_children),
                        [&] { return stop.stop_requested(); });
      }
      const auto now = SteadyClock::now();
      if (now >= next_children) {
        looks.run([this] { find_children(); });
        next_children = std::max(now + kLookEvery, looks.next());
      }
      if (now >= next_write) {
        write();
        next_write = now + kWriteEvery;
      }
    }
    write();
  }

  void find_children() {
    auto found = children_of(::getpid());
    const auto mine = has_group_alone(found);
    std::lock_guard lock(mutex);
    children = std::move(found);
    alone = alone && mine;
  }

  void write() {
    std::vector<StepRow> new_rows;
    std::vector<Cut> new_cuts;
    std::vector<Figure> new_figures;
    std::vector<Holding> new_holdings;
    std::vector<Mark> new_marks;
    std::vector<std::pair<std::string, std::string>> new_notes, new_meta;
    bool forget = false;
    {
      std::lock_guard lock(mutex);
      std::swap(forget, forget_steps);
      new_rows.swap(queued_rows);
      new_cuts.swap(queued_cuts);
      new_figures.swap(queued_figures);
      new_holdings.swap(queued_holdings);
      new_marks.swap(queued_marks);
      new_notes.swap(queued_notes);
      new_meta.swap(queued_meta);
    }
    const auto changes = observer().births().drain();
    std::lock_guard lock(file_mutex);
    if (recording == nullptr) {
      return;
    }
    try {
      recording->begin();
      if (forget) {
        recording->forget_steps();
      }
      for (const auto& row : new_rows) {
        recording->add(row);
      }
      recording->add(changes);
      for (const auto& cut : new_cuts) {
        recording->add(cut);
      }
      for (const auto& figure : new_figures) {
        recording->add(figure);
      }
      for (const auto& holding : new_holdings) {
        recording->add(holding);
      }
      for (const auto& mark : new_marks) {
        recording->add(mark);
      }
      for (const auto& [kind, text] : new_notes) {
        recording->note(seconds(), kind, text);
      }
      for (const auto& [key, value] : new_meta) {
        recording->put(key, value);
      }
      recording->commit();
      cached.store(recording->cached_bytes(), std::memory_order_relaxed);
    } catch (const std::exception& error) {
      broken = error.what();
      recording.reset();
      cached.store(0, std::memory_order_relaxed);
      observer().births().tell(false);
    }
  }

  WatchOptions options;
  const uint32_t process = fork_generation();
  const SteadyClock::time_point began = SteadyClock::now();
  mutable std::mutex mutex;  // guards what follows
  std::condition_variable wake;
  std::vector<StepRow> rows, queued_rows;
  std::map<OriginId, std::vector<Cut>> cuts;
  Evidence evidence;
  std::vector<Cut> queued_cuts;
  std::vector<Figure> queued_figures;
  std::vector<Holding> queued_holdings;
  std::vector<Mark> queued_marks;
  std::vector<std::pair<std::string, std::string>> queued_notes, queued_meta;
  uint64_t steps = 0;
  uint64_t next_due = kFirstDue;
  bool ticking = false;                                  // the clock has ticked
  bool forget_steps = false;                             // those in the recording
  double cut_time = 0, children_time = 0;                // seconds
  int64_t heap_bytes = 0, heap_free = 0, heap_held = 0;  // when malloc was last asked
  KeptHeap kept_heap;
  std::vector<pid_t> children;
  bool alone = true;                      // in the memory group, so far
  std::optional<int64_t> children_bytes;  // when they were last asked
  Flow last;
  std::chrono::nanoseconds spent{0};

  mutable std::mutex file_mutex;
  std::unique_ptr<Recording> recording;
  std::string broken;
  std::atomic<int64_t> cached = 0;  // heap that is the recording's, after the last commit

  Sampler::Refresh refresh;
  Clock::Subscription steps_of_clock;
  std::jthread writer;
};

Watch::Watch(WatchOptions options) : state_(std::make_unique<State>(std::move(options))) {
  auto& state = *state_;
  observer().set_step(clock().now());
  observer().start(state.options.level);
  observer().births().tell(state.recording != nullptr && state.options.level >= Level::trace);
  state.refresh = Sampler::shared().refresh(1s);
  state.steps_of_clock = clock().subscribe([&state](uint64_t step) { state.clock_ticked(step); });
  state.writer = std::jthread([&state](const std::stop_token& stop) { state.run(stop); });
}

Watch::~Watch() {
  if (state_->process != fork_generation()) {
    // The writer, the file and the subscription are the parent's: nothing of them may be touched.
    static_cast<void>(state_.release());  // NOLINT(bugprone-unused-return-value)
    return;
  }
  state_->steps_of_clock = Clock::Subscription();
  observer().stop();
  state_->writer.request_stop();
  state_->wake.notify_one();
  state_->writer.join();
  observer().births().tell(false);
  state_.reset();
  Sampler::shared().rest();
}

bool Watch::end_interval(uint64_t number) {
  {
    std::lock_guard lock(state_->mutex);
    if (state_->ticking) {
      return false;
    }
  }
  state_->end_step(number);
  return true;
}

void Watch::step_up(Level level, uint64_t cap) {
  {
    std::lock_guard lock(state_->file_mutex);
    if (observer().level() >= level || observer().level() == Level::off) {
      return;
    }
    if (state_->recording != nullptr) {
      state_->recording->raise_cap(cap);
      observer().births().tell(true);
    }
  }
  observer().step_up(level);
}

bool Watch::due() {
  std::lock_guard lock(state_->mutex);
  if (state_->steps < state_->next_due) {
    return false;
  }
  state_->next_due = state_->steps + std::max<uint64_t>(2, state_->steps / 5);
  return true;
}

bool Watch::ticking() const {
  std::lock_guard lock(state_->mutex);
  return state_->ticking;
}

std::vector<StepRow> Watch::rows() const {
  std::lock_guard lock(state_->mutex);
  return state_->rows;
}

void Watch::set_evidence(Evidence evidence) {
  std::lock_guard lock(state_->mutex);
  state_->evidence = std::move(evidence);
}

Evidence Watch::evidence() const {
  std::lock_guard lock(state_->mutex);
  return state_->evidence;
}

std::map<OriginId, std::vector<Cut>> Watch::cuts() const {
  std::lock_guard lock(state_->mutex);
  return state_->cuts;
}

void Watch::add(Holding holding) {
  std::lock_guard lock(state_->mutex);
  state_->queued_holdings.push_back(std::move(holding));
}

void Watch::add(std::vector<Mark> marks) {
  std::lock_guard lock(state_->mutex);
  auto& queue = state_->queued_marks;
  queue.insert(queue.end(), std::make_move_iterator(marks.begin()),
               std::make_move_iterator(marks.end()));
}

void Watch::note(std::string kind, std::string text) {
  std::lock_guard lock(state_->mutex);
  state_->queued_notes.emplace_back(std::move(kind), std::move(text));
}

void Watch::put(std::string key, std::string value) {
  std::lock_guard lock(state_->mutex);
  state_->queued_meta.emplace_back(std::move(key), std::move(value));
}

void Watch::spend(std::chrono::nanoseconds time) {
  std::lock_guard lock(state_->mutex);
  state_->spent += time;
}

double Watch::cost() const {
  std::lock_guard lock(state_->mutex);
  const auto spent = std::chrono::duration<double>(state_->spent).count() +
                     static_cast<double>(observer().cost()) * 1e-9;
  const auto all = state_->seconds();
  return all > 0 ? spent / all : 0;
}

std::string Watch::broken() const {
  std::lock_guard lock(state_->file_mutex);
  return state_->broken;
}

}  // namespace tenure::inspect
