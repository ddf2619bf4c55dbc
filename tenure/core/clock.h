// Clock: the one step counter of a process. Several things may announce the end of a step: the
// user's own call, a scope named `step`, a monitor, a pipeline, and, where nobody else does, the
// optimizer. They are counted so that one step counts once, whoever announces it. Any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace tenure {

class Clock {
 public:
  // How a step's end is known. Explicit beats implicit: once anyone says it, inference stops.
  enum class Source : uint8_t { implicit, explicitly };

  // Steps that have ended. While step n runs, now() == n if the loop counts from 0.
  uint64_t now() const;

  // Step `number`, or the next one, has ended. `who` tells announcers apart, newer ones by higher
  // numbers: the first one leads, and others' ticks are echoes of the same step, unless they come
  // twice without the leader or are made anew at every step. See Note [Who leads].
  // Subscribers run on this thread before it returns; all of them run, and the first exception that
  // one throws is thrown then. True if the tick counted.
  bool tick(Source source, uint64_t who, std::optional<uint64_t> number = {});

  // `who` announces no more steps for now: if it led, whoever comes next does, inferred or not.
  void leave(uint64_t who);

  // Calls `fn` with the number of each step that ends, until the subscription goes. A call that is
  // in flight on another thread may still finish. A forked child starts without subscribers.
  class Subscription {
   public:
    Subscription() = default;
    explicit Subscription(std::shared_ptr<const std::function<void(uint64_t)>> fn);
    Subscription(Subscription&& other) noexcept = default;
    Subscription& operator=(Subscription&& other) noexcept;
    Subscription(const Subscription&) = delete;
    Subscription& operator=(const Subscription&) = delete;
    ~Subscription();

   private:
    std::shared_ptr<const std::function<void(uint64_t)>> fn_;  // shared with ticks in flight
  };
  [[nodiscard]] Subscription subscribe(std::function<void(uint64_t)> fn);

 private:
  friend Clock& clock();
  Clock();
  bool leads(Source source, uint64_t who);

  mutable std::mutex mutex_;
  uint64_t now_ = 0;
  Source source_ = Source::implicit;
  std::optional<uint64_t> leader_;
  std::map<uint64_t, int> since_leader_;  // ticks of others since the leader's last
  uint64_t newest_ = 0;                   // the highest announcer so far
  uint64_t newcomers_ = 0;                // never seen before, in a row
  bool replaced_each_step_ = false;
  std::vector<std::shared_ptr<const std::function<void(uint64_t)>>> subscribers_;
};

Clock& clock();

}  // namespace tenure
