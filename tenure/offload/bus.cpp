#include <tenure/offload/bus.h>

#include <algorithm>
#include <deque>

namespace tenure::offload {
namespace {

constexpr double kBackward = 2;  // times forward

// By interval: forward's calls.
std::vector<double> forward_seconds(const Timeline& timeline, const Trace& trace) {
  std::vector<double> out(timeline.ticks());
  size_t at = 0;
  for (const auto& call : trace.calls) {
    for (const auto output : call.outputs) {
      at = std::max(at, trace.values[output].born);
    }
    if (at < out.size()) {
      out[at] += call.seconds;
    }
  }
  return out;
}

// By tick: the storage that is first needed then; none: one is saved.
std::vector<uint32_t> needs(const Timeline& timeline) {
  std::vector<uint32_t> out(timeline.ticks(), kNone);
  for (uint32_t i = 0; i < timeline.saved.size(); ++i) {
    if (timeline.saved[i].needed < out.size()) {
      out[timeline.saved[i].needed] = i;
    }
  }
  return out;
}

// The nearest to these that never falls: some storages are saved in one layer and used by all.
std::vector<double> never_falling(const std::vector<double>& values) {
  struct Level {
    double sum;
    size_t count;
    double mean() const { return sum / static_cast<double>(count); }
  };
  std::vector<Level> levels;
  for (const auto value : values) {
    levels.push_back({value, 1});
    while (levels.size() > 1 && levels[levels.size() - 2].mean() > levels.back().mean()) {
      const auto last = levels.back();
      levels.pop_back();
      levels.back().sum += last.sum;
      levels.back().count += last.count;
    }
  }
  std::vector<double> out;
  for (const auto& level : levels) {
    out.insert(out.end(), level.count, level.mean());
  }
  return out;
}

class Play {
 public:
  Play(const Timeline& timeline, const Plan& plan, const Bus& bus)
      : timeline_(timeline), plan_(plan), bus_(bus) {
    saved_at_.resize(timeline.ticks());
    needed_at_.resize(timeline.ticks());
    for (uint32_t i = 0; i < timeline.saved.size(); ++i) {
      const auto& saved = timeline.saved[i];
      if (plan.actions[i] == Action::offload && saved.saved < timeline.ticks()) {
        saved_at_[saved.saved].push_back(i);
        if (saved.needed < timeline.ticks()) {
          needed_at_[saved.needed].push_back(i);
        }
      }
    }
    left_.resize(timeline.saved.size());
    there_.resize(timeline.saved.size());
  }

  double run(const std::vector<double>& seconds) {
    for (size_t tick = 0; tick < timeline_.ticks(); ++tick) {
      send(tick);
      make_room(tick);
      fetch(tick);
      need(tick);
      now_ += seconds[tick];
    }
    return waited_;
  }

 private:
  double seconds_out(uint32_t i) const {
    return static_cast<double>(timeline_.saved[i].bytes) / bus_.out;
  }
  double seconds_back(uint32_t i) const {
    return static_cast<double>(timeline_.saved[i].bytes) / bus_.back;
  }

  void wait(double until) {
    waited_ += std::max(until - now_, 0.0);
    now_ = std::max(now_, until);
  }

  void send(size_t tick) {
    for (const auto i : saved_at_[tick]) {
      out_free_ = std::max(out_free_, now_) + seconds_out(i);
      left_[i] = out_free_;
      leaving_.push_back(i);
    }
  }

  void make_room(size_t tick) {
    int64_t holding = 0;  // what others still hold takes no room of ours
    for (const auto i : leaving_) {
      const auto& saved = timeline_.saved[i];
      holding += left_[i] > now_ && gone_from(saved) <= tick && saved.needed > tick
                     ? static_cast<int64_t>(saved.bytes)
                     : 0;
    }
    const auto room = plan_.room[tick];
    while (!leaving_.empty() && (holding > room || left_[leaving_.front()] <= now_)) {
      const auto i = leaving_.front();
      const auto& saved = timeline_.saved[i];
      leaving_.pop_front();
      if (left_[i] > now_ && gone_from(saved) <= tick && saved.needed > tick) {
        holding -= static_cast<int64_t>(saved.bytes);
      }
      wait(left_[i]);
    }
  }

  // What has not left yet need not go.
  void fetch(size_t tick) {
    for (const auto i : plan_.fetch[tick]) {
      if (left_[i] <= now_) {
        back_free_ = std::max(back_free_, now_) + seconds_back(i);
        there_[i] = back_free_;
      }
    }
  }

  void need(size_t tick) {
    for (const auto i : needed_at_[tick]) {
      wait(there_[i]);
      const auto& saved = timeline_.saved[i];
      if (!plan_.stays[i] && saved.uses > 1 && saved.last > saved.needed) {
        waited_ += seconds_back(i) * (saved.uses - 1);  // each use fetches it
      }
    }
  }

  const Timeline& timeline_;
  const Plan& plan_;
  const Bus& bus_;
  std::vector<std::vector<uint32_t>> saved_at_;  // by tick: those that move
  std::vector<std::vector<uint32_t>> needed_at_;
  std::vector<double> left_;   // by storage: when it has left
  std::vector<double> there_;  // and when it is back
  std::deque<uint32_t> leaving_;
  double now_ = 0;
  double out_free_ = 0;
  double back_free_ = 0;
  double waited_ = 0;
};

}  // namespace

std::vector<double> interval_seconds(const Timeline& timeline, const Trace& trace) {
  auto out = forward_seconds(timeline, trace);
  const auto need = needs(timeline);
  std::vector<double> saved_at(timeline.ticks());  // in forward's time
  double forward = 0;                              // until now
  size_t tick = 0;
  while (tick < timeline.ticks()) {
    const auto begin = forward;  // of this turn's
    for (; tick < timeline.ticks() && need[tick] == kNone; ++tick) {
      saved_at[tick] = forward;
      forward += out[tick];
    }
    const auto first = tick;
    std::vector<double> at;
    for (; tick < timeline.ticks() && need[tick] != kNone; ++tick) {
      const auto saved = std::min(timeline.saved[need[tick]].saved, tick);
      at.push_back(kBackward * (forward - saved_at[saved]));
    }
    at = never_falling(at);
    at.push_back(std::max(kBackward * (forward - begin), at.empty() ? 0 : at.back()));
    double reached = 0;
    for (size_t i = 0; i < at.size() && first > 0 && tick > first; ++i) {
      out[first + i - 1] += at[i] - reached;
      reached = at[i];
    }
  }
  return out;
}

double bus_seconds(const Timeline& timeline, const Plan& plan, const Bus& bus,
                   const std::vector<double>& seconds) {
  return bus.moves() ? Play(timeline, plan, bus).run(seconds) : 0;
}

}  // namespace tenure::offload
