#include <tenure/telemetry/monitor.h>

#include <tenure/core/clock.h>
#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/quiet_thread.h>
#include <tenure/core/text.h>
#include <tenure/telemetry/sampling.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>

namespace tenure::telemetry {
namespace {

constexpr size_t kMostTold = 256;    // intervals that wait for a reader
constexpr size_t kMostRecent = 128;  // rows that are remembered

MonitorOptions checked(MonitorOptions options) {
  if (options.every == 0) {
    throw InputError("a monitor looks every 1 or more steps, not every 0");
  }
  if (options.ranks == 0 || options.ranks > kMostRanks || options.rank >= options.ranks) {
    throw InputError(text("rank ", options.rank, " of ", options.ranks, " is none: there are 1 to ",
                          kMostRanks, " ranks"));
  }
  if (options.stages == 0 || options.stages > kMostStages || options.stage >= options.stages) {
    throw InputError(text("stage ", options.stage, " of ", options.stages,
                          " is none: there are 1 to ", kMostStages, " stages"));
  }
  return options;
}

}  // namespace

struct Monitor::State {
  State(MonitorOptions asked, std::unique_ptr<Reduction> groups, std::unique_ptr<Board> rows)
      : options(std::move(asked)),
        words(at::empty({static_cast<int64_t>(words_of(options.stages))}, at::kLong)),
        reduction(std::move(groups)),
        board(std::move(rows)) {}

  const MonitorOptions options;
  const uint32_t generation = fork_generation();
  Sampling sampling;

  // The training thread's.
  std::optional<std::thread::id> stepper;
  uint64_t steps = 0;

  // The monitor's own thread's.
  at::Tensor words;
  std::unique_ptr<Reduction> reduction;
  std::unique_ptr<Board> board;
  uint64_t number = 0;
  std::string lost;

  std::atomic<uint64_t> collectives{0};
  std::atomic<bool> knows_peaks{true};

  mutable std::mutex mutex;
  std::condition_variable_any changed;
  std::deque<Row> due;
  uint64_t skipped = 0;  // intervals after those in `due` whose rows were not kept
  std::deque<Told> told;
  uint64_t missed = 0;
  std::deque<Row> recent;
  std::vector<std::optional<uint32_t>> extremes;
  bool closing = false;
  bool ended = false;

  std::jthread thread;  // last: it uses all of the above

  [[nodiscard]] bool inherited() const { return generation != fork_generation(); }

  void hand_over(const Row& row) {
    {
      const std::lock_guard lock(mutex);
      // Other ranks count on a collective for each interval, so what cannot be kept is counted.
      if (skipped > 0 || due.size() >= options.most_due) {
        ++skipped;
      } else {
        due.push_back(row);
      }
    }
    changed.notify_all();
  }

  // What is to be told next; nullopt: nothing more.
  std::optional<Row> next_due() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return closing || !due.empty() || skipped > 0; });
    if (!due.empty()) {
      auto row = due.front();
      due.pop_front();
      return row;
    }
    if (skipped > 0) {
      --skipped;
      return Row();
    }
    return std::nullopt;
  }

  void run(const std::stop_token& stop) {
    ::pthread_setname_np(::pthread_self(), "tenure-monitor");
    while (auto row = next_due()) {
      if (!tell(*row, stop)) {
        break;
      }
    }
    {
      const std::lock_guard lock(mutex);
      ended = true;
    }
    changed.notify_all();
  }

  // False: asked to stop.
  bool tell(Row& row, const std::stop_token& stop) {
    if (row.when != 0) {
      sampling.finish(row);
      remember(row);
    }
    Told out;
    out.number = ++number;
    out.own = row;
    const std::span<int64_t> all(words.mutable_data_ptr<int64_t>(), words.numel());
    write_words(row, options.rank, options.stage, all);
    if (reduction && lost.empty()) {
      try {
        if (!together(out, stop)) {
          return false;
        }
      } catch (const std::exception& error) {
        lost = error.what();
        write_words(row, options.rank, options.stage, all);
      }
    }
    out.lost = lost;
    if (row.when != 0) {
      remember_extremes(all);
    }
    if (!options.reads || row.when == 0) {
      return true;
    }
    if (out.found.empty()) {
      out.found = read_words(all);
      out.peak_rank = options.rank;
    }
    if (out.peak_rank == options.rank) {
      out.peak_row = row;
    }
    if (out.rows.empty() && options.ranks == 1) {
      out.rows.push_back(row);
    }
    keep_for_reader(std::move(out));
    return true;
  }

  // The figures of all ranks. False: asked to stop.
  bool together(Told& out, const std::stop_token& stop) {
    const bool shows =
        options.rows_every != 0 && number % options.rows_every == 1 % options.rows_every;
    if (shows) {
      on_board([&](Board& rows) { rows.post(out.own); });
    }
    const bool done = reduction->reduce(words, stop);
    collectives = reduction->collectives();
    if (!done) {
      return false;
    }
    out.found = read_words({words.const_data_ptr<int64_t>(), static_cast<size_t>(words.numel())});
    out.peak_rank = peak_rank(out.found);
    on_board([&](Board& rows) {
      rows.tidy();
      if (out.peak_rank == options.rank) {
        rows.post_peak(number, out.own);
      } else if (options.reads_rows) {
        out.peak_row = rows.peak(number, options.patience);
      }
      if (shows && options.reads_rows) {
        out.rows = rows.all();
      }
    });
    return true;
  }

  // A store that fails costs rows and nothing else.
  template <class Act>
  void on_board(Act act) {
    if (!board) {
      return;
    }
    try {
      act(*board);
    } catch (const std::exception&) {
      board.reset();
    }
  }

  void remember(const Row& row) {
    if (options.keep) {
      options.keep(row);
    }
    const std::lock_guard lock(mutex);
    recent.push_back(row);
    if (recent.size() > kMostRecent) {
      recent.pop_front();
    }
  }

  void remember_extremes(std::span<const int64_t> all) {
    const auto world = read_words(all.first(kKeys));
    std::vector<std::optional<uint32_t>> ranks;
    for (const auto& found : world) {
      ranks.push_back(found ? std::optional(found->rank) : std::nullopt);
    }
    const std::lock_guard lock(mutex);
    extremes = std::move(ranks);
  }

  void keep_for_reader(Told&& out) {
    {
      const std::lock_guard lock(mutex);
      if (told.size() >= kMostTold) {
        told.pop_front();
        ++missed;
      }
      out.missed = missed;
      told.push_back(std::move(out));
    }
    changed.notify_all();
  }

  void close(std::chrono::milliseconds patience) {
    {
      std::unique_lock lock(mutex);
      closing = true;
      changed.notify_all();
      changed.wait_for(lock, patience, [&] { return ended; });
    }
    thread = {};  // asks it to stop and joins
    // Others that wait for this rank see that it has left.
    board.reset();
    reduction.reset();
  }
};

Monitor::Monitor(MonitorOptions options, std::unique_ptr<Reduction> reduction,
                 std::unique_ptr<Board> board)
    : state_(std::make_unique<State>(checked(std::move(options)), std::move(reduction),
                                     std::move(board))) {
  state_->thread =
      quiet_thread("the monitor's thread",
                   [state = state_.get()](const std::stop_token& stop) { state->run(stop); });
}

Monitor::~Monitor() {
  if (state_->inherited()) {
    state_.release();  // NOLINT(bugprone-unused-return-value): the parent's thread uses it
    return;
  }
  close(std::chrono::milliseconds(0));
}

bool Monitor::step() {
  auto& state = *state_;
  if (state.inherited()) {
    throw InputError(
        "this monitor belongs to the process that was forked: make one of its own here");
  }
  if (!state.thread.joinable()) {
    throw InputError("this monitor is closed");
  }
  const auto self = std::this_thread::get_id();
  if (state.stepper.value_or(self) != self) {
    throw InputError("monitor.step() is called from two threads: call it from the one that trains");
  }
  state.stepper = self;
  clock().tick(Clock::Source::explicitly, state.options.who);
  if (++state.steps % state.options.every != 0) {
    return false;
  }
  const auto row = state.sampling.begin(clock().now(), state.options.every);
  state.knows_peaks = state.sampling.knows_peaks();
  state.hand_over(row);
  return true;
}

std::optional<Told> Monitor::next(std::chrono::milliseconds patience) {
  auto& state = *state_;
  std::unique_lock lock(state.mutex);
  state.changed.wait_for(lock, patience, [&] { return state.ended || !state.told.empty(); });
  if (state.told.empty()) {
    return std::nullopt;
  }
  auto out = std::move(state.told.front());
  state.told.pop_front();
  return out;
}

bool Monitor::over() const {
  const std::lock_guard lock(state_->mutex);
  return state_->ended && state_->told.empty();
}

std::vector<Row> Monitor::recent() const {
  const std::lock_guard lock(state_->mutex);
  return {state_->recent.begin(), state_->recent.end()};
}

std::vector<std::optional<uint32_t>> Monitor::extremes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->extremes;
}

uint64_t Monitor::collectives() const { return state_->collectives; }

bool Monitor::knows_peaks() const { return state_->knows_peaks; }

void Monitor::close(std::chrono::milliseconds patience) {
  if (!state_->inherited() && state_->thread.joinable()) {
    state_->close(patience);
  }
}

}  // namespace tenure::telemetry
