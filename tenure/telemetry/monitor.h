// Monitor: every so many steps, what all ranks have of memory, and which rank has most of it.
//
// The training thread hands over what it read and goes on; a thread of the monitor's own adds what
// the system says, and another reduces it with the other ranks' (issued at one interval, known by
// the next) and keeps the result for whoever asks. So a row is of its step also when a rank is
// late. A rank that leaves costs the others its figures and nothing else: from then on each tells
// its own. An interval for which there is no memory is not told, and counts among those known.
//
// Threading: step() on one thread, the first that calls it. close() on any: step() throws from
// then on. next(), known(), recent(), extremes() and collectives() on any. Nothing here
// takes the GIL. A forked child has none of it.
#pragma once

#include <tenure/telemetry/board.h>
#include <tenure/telemetry/keys.h>
#include <tenure/telemetry/layout.h>
#include <tenure/telemetry/reduction.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tenure::telemetry {

struct MonitorOptions {
  uint64_t every = 10;  // steps of an interval
  uint64_t who = 0;     // as the step clock knows this announcer
  uint32_t rank = 0;
  uint32_t ranks = 1;
  uint32_t stage = 0;
  uint32_t stages = 1;
  bool reads = true;         // whether anyone calls next() on this rank
  uint64_t rows_every = 10;  // intervals after which all ranks' rows are shown; 0: never
  // Whether next() has other ranks' rows, too: one rank's business, as each row is asked for.
  bool reads_rows = true;
  size_t most_due = 4096;  // rows that are kept for a rank that is behind; more are counted
  std::chrono::milliseconds patience{5000};  // for a row that another rank shows, while they do
  // Called with each row of this rank on a thread of the monitor's. It must not throw.
  // NOLINTNEXTLINE(readability-redundant-member-init): so that it may be left out
  std::function<void(const Row&)> keep{};
};

// One interval.
struct Told {
  uint64_t number = 0;  // of the interval, from 1
  Row own;
  std::vector<std::optional<Found>> found;  // words_of(stages), as Layout has them
  uint32_t peak_rank = 0;
  std::optional<Row> peak_row;
  std::vector<Row> rows;  // by rank, or empty
  uint64_t missed = 0;    // intervals that nobody asked for in time, so far
  std::string lost;       // why ranks are not together any more; empty while they are
  std::string rowless;    // why other ranks' rows are not seen any more; empty while they are
};

class Monitor {
 public:
  // Without a reduction it is alone, and tells the same of one rank. Throws InputError for figures
  // that do not fit together.
  Monitor(MonitorOptions options, std::unique_ptr<Reduction> reduction,
          std::unique_ptr<Board> board);
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // A training step has ended. True if an interval has, too. Throws InputError on another thread
  // than the first one's, once closed, and in a forked child.
  bool step();

  // The next interval that is known, or nullopt after `patience` or when there will be none.
  std::optional<Told> next(std::chrono::milliseconds patience);
  // How many intervals next() had or has, or will never have for want of memory. For whoever waits
  // for one of them.
  uint64_t known() const;
  // Whether next() will never have one again.
  bool over() const;

  // The newest rows of this rank, oldest first.
  std::vector<Row> recent() const;
  // By key: whose figure is the one that is told, in the last interval that is known. Also where
  // nobody reads. Empty: there was none.
  std::vector<std::optional<uint32_t>> extremes() const;
  uint64_t collectives() const;
  // Whether interval peaks of the device are always known.
  bool knows_peaks() const;

  // Waits for what is under way, at most so long, and ends the thread. A second call does nothing.
  void close(std::chrono::milliseconds patience);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tenure::telemetry
