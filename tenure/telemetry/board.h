// Board: rows that ranks show each other through the job's store, where the reduction tells
// extremes alone: now and then every rank's, and of each interval the peak rank's, so that what is
// shown as one row was one.
//
// Threading: one thread at a time. It uses a clone of the store, for a shared one blocks the
// training thread while this one waits; the clone is made when it is first needed, because a
// thousand that connect at once wait for seconds, and here nothing waits for them.
#pragma once

#include <tenure/telemetry/keys.h>

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace tenure::telemetry {

class Board {
 public:
  Board(c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t ranks);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  // Before the reduction of interval `number`, in which all ranks do: then all are there after it.
  // None is told where one rank never could; one that cannot any more has a row without figures.
  void post(uint64_t number, const Row& own);
  std::vector<Row> all(uint64_t number);

  // After the reduction of interval `number`: the peak rank shows its row, the reader waits for it,
  // at most `patience` and until it is asked to stop. A row that was shown before is taken away:
  // all have read it.
  void post_peak(uint64_t number, const Row& own);
  std::optional<Row> peak(uint64_t number, std::chrono::milliseconds patience,
                          const std::stop_token& stop);
  void tidy();

  // After a failure: leaves the clone for good, for one of a file that is gone ends the process
  // when it is destroyed.
  void abandon();

 private:
  c10d::Store& store();

  c10::intrusive_ptr<c10d::Store> jobs_;  // the job's own
  c10::intrusive_ptr<c10d::Store> clone_;
  uint32_t rank_;
  uint32_t ranks_;
  std::string posted_;
};

}  // namespace tenure::telemetry
