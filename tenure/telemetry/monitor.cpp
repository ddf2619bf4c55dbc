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
#include <new>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>

namespace tenure::telemetry {
namespace {

constexpr size_t kMostTold = 256;    // intervals that wait for a reader
constexpr size_t kMostRecent = 128;  // rows that are remembered
constexpr size_t kMostBegun = 64;    // rows that wait for the rest of their figures
// For a row when the one before it did not come: a rank without a store shows none, ever.
constexpr std::chrono::milliseconds kBriefly{50};

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
  std::atomic<std::thread::id> stepper;  // none: there was no step
  uint64_t steps = 0;

  // The telling thread's.
  at::Tensor words;
  std::unique_ptr<Reduction> reduction;
  std::unique_ptr<Board> board;
  uint64_t number = 0;
  std::string lost;
  std::string rowless;
  bool rows_come = true;  // the last one that was asked for did

  std::atomic<uint64_t> collectives{0};
  std::atomic<uint64_t> known{0};
  std::atomic<bool> knows_peaks{true};

  mutable std::mutex mutex;
  std::condition_variable_any changed;
  std::deque<Row> begun;
  uint64_t not_begun = 0;  // intervals after those in `begun` whose rows were not kept
  std::deque<Row> due;
  uint64_t skipped = 0;  // intervals after those in `due` whose rows were not kept
  std::deque<Told> told;
  uint64_t missed = 0;
  std::deque<Row> recent;
  std::vector<std::optional<uint32_t>> extremes;
  std::atomic<bool> closing{false};
  bool sampled = false;  // all that will be
  bool ended = false;

  // Last: they use all of the above.
  std::jthread thread;   // takes what is due to the other ranks, and may wait for them
  std::jthread sampler;  // reads what the system says when the training thread has begun a row

  [[nodiscard]] bool inherited() const { return generation != fork_generation(); }

  // Other ranks count on a collective for each interval, so what cannot be kept is counted.
  static void add(std::deque<Row>& rows, uint64_t& left_out, size_t most, const Row& row) {
    if (left_out > 0 || rows.size() >= most) {
      ++left_out;
      return;
    }
    try {
      rows.push_back(row);
    } catch (const std::bad_alloc&) {
      ++left_out;
    }
  }

  // Nullopt: none. A row without a time: one that was left out.
  static std::optional<Row> take(std::deque<Row>& rows, uint64_t& left_out) {
    if (!rows.empty()) {
      auto row = rows.front();
      rows.pop_front();
      return row;
    }
    if (left_out > 0) {
      --left_out;
      return Row();
    }
    return std::nullopt;
  }

  void hand_over(const Row& row) {
    {
      const std::lock_guard lock(mutex);
      add(begun, not_begun, kMostBegun, row);
    }
    changed.notify_all();
  }

  std::optional<Row> next_begun() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return closing || !begun.empty() || not_begun > 0; });
    return take(begun, not_begun);
  }

  // A row is of its step also when another rank is late: this thread waits for none.
  void sample() {
    ::pthread_setname_np(::pthread_self(), "tenure-sample");
    while (auto row = next_begun()) {
      if (row->when != 0) {
        try {
          sampling.finish(*row);
          remember(*row);
        } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): what is known is told
        }
      }
      {
        const std::lock_guard lock(mutex);
        add(due, skipped, options.most_due, *row);
      }
      changed.notify_all();
    }
    {
      const std::lock_guard lock(mutex);
      sampled = true;
    }
    changed.notify_all();
  }

  // What is to be told next; nullopt: nothing more.
  std::optional<Row> next_due() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return sampled || !due.empty() || skipped > 0; });
    return take(due, skipped);
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
  bool tell(const Row& row, const std::stop_token& stop) {
    ++number;
    const std::span<int64_t> all(words.mutable_data_ptr<int64_t>(), words.numel());
    write_words(row, options.rank, options.stage, all);
    if (reduction && !reduce(row, stop)) {
      return false;
    }
    try {
      report(row, all, stop);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the next one may be told
    }
    known = number;
    return true;
  }

  bool shows_rows() const {
    return options.rows_every != 0 && number % options.rows_every == 1 % options.rows_every;
  }

  // Makes of `words` those of all ranks. False: asked to stop.
  bool reduce(const Row& row, const std::stop_token& stop) {
    try {
      if (shows_rows()) {
        on_board([&](Board& rows) { rows.post(number, row); });
      }
      const bool done = reduction->reduce(words, stop);
      collectives = reduction->collectives();
      return done;
    } catch (const std::exception& error) {
      lost = error.what();
    }
    reduction.reset();  // others that wait for this rank see that it has left
    write_words(row, options.rank, options.stage,
                {words.mutable_data_ptr<int64_t>(), static_cast<size_t>(words.numel())});
    return true;
  }

  void report(const Row& row, std::span<const int64_t> all, const std::stop_token& stop) {
    Told out;
    out.number = number;
    out.own = row;
    out.lost = lost;
    if (reduction) {
      read_others(out, all, stop);
    }
    if (row.when != 0) {
      remember_extremes(all);
    }
    out.rowless = rowless;
    if (!options.reads || row.when == 0) {
      return;
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
  }

  // The figures of all ranks.
  void read_others(Told& out, std::span<const int64_t> all, const std::stop_token& stop) {
    out.found = read_words(all);
    drop_unknown_peaks(out.found, knows_peaks);
    out.peak_rank = peak_rank(out.found);
    on_board([&](Board& rows) {
      rows.tidy();
      if (out.peak_rank == options.rank) {
        rows.post_peak(number, out.own);
      } else if (options.reads_rows) {
        out.peak_row = rows.peak(number, rows_come ? options.patience : kBriefly, stop);
        rows_come = out.peak_row.has_value();
      }
      if (shows_rows() && options.reads_rows) {
        out.rows = rows.all(number);
      }
    });
  }

  // A store that fails costs rows and nothing else.
  template <class Act>
  void on_board(Act act) {
    if (!board) {
      return;
    }
    try {
      act(*board);
    } catch (const std::exception& error) {
      rowless = first_line(error.what());
      board->abandon();
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
    sampler = {};
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
  auto* state = state_.get();
  state->sampler = quiet_thread("the monitor's first thread", [state] { state->sample(); });
  try {
    state->thread = quiet_thread("the monitor's second thread",
                                 [state](const std::stop_token& stop) { state->run(stop); });
  } catch (...) {
    state->close(std::chrono::milliseconds(0));
    throw;
  }
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
  if (state.closing) {
    throw InputError("this monitor is closed");
  }
  const auto self = std::this_thread::get_id();
  std::thread::id first;
  if (!state.stepper.compare_exchange_strong(first, self) && first != self) {
    throw InputError("monitor.step() is called from two threads: call it from the one that trains");
  }
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

uint64_t Monitor::known() const { return state_->known; }

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
