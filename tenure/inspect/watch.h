// Watch: one session of watching this process: what the observer saw, step by step, kept for the
// verdict and written to a recording by a thread of its own. One at a time in a process; any thread
// may ask. A forked child is not watched.
#pragma once

#include <tenure/inspect/observer.h>
#include <tenure/inspect/recording.h>
#include <tenure/inspect/step_row.h>
#include <tenure/inspect/verdict.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tenure::inspect {

struct WatchOptions {
  Level level = Level::trace;
  std::string path;  // of the recording; empty: none
  uint64_t cap = uint64_t{256} << 20;
  std::vector<std::pair<std::string, std::string>> meta;
  Redactor redact;
};

class Watch {
 public:
  // Throws what Observer::start and Recording throw; nothing is installed then.
  explicit Watch(WatchOptions options);
  // Stops watching; the recording is complete up to now.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Programs without steps have intervals of time in their place. Once the clock ticks they are
  // forgotten, and this returns false.
  bool end_interval(uint64_t number);
  // Sees more from now on, and records it up to a higher cap. Nothing if it sees as much already.
  void step_up(Level level, uint64_t cap);
  // Whether it is time to judge: at growing distances, so that judging costs little.
  bool due();

  // Whether rows are steps, rather than intervals.
  bool ticking() const;
  std::vector<StepRow> rows() const;
  // Bytes alive by origin, each at the steps where someone looked.
  std::map<OriginId, std::vector<Cut>> cuts() const;

  // What was found out by looking at holders.
  void set_evidence(Evidence evidence);
  Evidence evidence() const;

  void add(Holding holding);
  void add(std::vector<Mark> marks);
  void note(std::string kind, std::string text);
  void put(std::string key, std::string value);
  // Time that judging and looking took, which counts as the cost of watching.
  void spend(std::chrono::nanoseconds time);
  // Share of the wall time that watching took so far.
  double cost() const;
  // Why nothing is recorded any more, or empty.
  std::string broken() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tenure::inspect
