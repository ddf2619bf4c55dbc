// A step under a fit plan, played naively.
#pragma once

#include "step.h"
#include <tenure/offload/fit_planner.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tenure::offload {

// Who is there is asked of each value at each moment.
class Played {
 public:
  Played(const Step& step, const FitPlan& plan)
      : step_(step), plan_(plan), answered_(plan.asks.size()), there_(plan.asks.size()) {
    for (const auto& saved : plan.timeline.saved) {
      uses_.push_back({saved.remade ? kNever : step_needed(uses_.size()),
                       saved.remade ? 0 : step_last(uses_.size())});
    }
    for (size_t t = 0; t < step.timeline.ticks(); ++t) {
      play(t);
    }
  }

  int64_t peak() const {
    int64_t peak = 0;
    for (size_t t = 0; t < intervals_.size(); ++t) {
      peak = std::max(peak, intervals_[t] + held(t));
    }
    return peak;
  }
  bool all_answered() const { return answered_ == plan_.asks; }

 private:
  struct Uses {
    size_t first = kNever;
    size_t last = 0;
  };

  bool is_root(size_t i) const { return i >= step_.timeline.saved.size(); }
  size_t step_needed(size_t i) const {
    return is_root(i) ? kNever : step_.timeline.saved[i].needed;
  }
  size_t step_last(size_t i) const { return is_root(i) ? 0 : step_.timeline.saved[i].last; }

  int64_t made() const {
    int64_t bytes = 0;
    for (size_t v = 0; v < there_.size(); ++v) {
      bytes += there_[v] ? static_cast<int64_t>(step_.trace.values[v].bytes) : 0;
    }
    return bytes;
  }

  void play(size_t tick) {
    const auto& timeline = step_.timeline;
    int64_t taken = 0;
    int64_t making = 0;
    for (size_t v = 0; v < plan_.asks.size(); ++v) {
      const auto index = step_.trace.values[v].saved;
      if (plan_.asks[v] > 0 && index != kNone && timeline.saved[index].needed == tick) {
        most_ = 0;
        ask(static_cast<uint32_t>(v), tick);
        making = most_ + (timeline.level.empty() ? timeline.peak[tick] : timeline.level[tick]);
        answer(static_cast<uint32_t>(v), 1);
        taken = there_[v] ? static_cast<int64_t>(step_.trace.values[v].bytes) : 0;
      }
    }
    intervals_.push_back(std::max(timeline.peak[tick] + made() - taken, making));
    for (size_t v = 0; v < plan_.asks.size(); ++v) {
      const auto index = step_.trace.values[v].saved;
      if (plan_.asks[v] > 0 && index != kNone && timeline.saved[index].last == tick) {
        answer(static_cast<uint32_t>(v), timeline.saved[index].uses - 1);
      }
    }
  }

  void ask(uint32_t v, size_t tick) {
    most_ = std::max(most_, made());
    if (plan_.asks[v] == 0) {
      use(v, tick);
      return;
    }
    if (there_[v]) {
      return;
    }
    const auto& call = step_.trace.calls[step_.trace.values[v].call];
    for (const auto input : call.inputs) {
      ask(input, tick);
    }
    for (const auto output : call.outputs) {
      there_[output] = true;
    }
    most_ = std::max(most_, made() + static_cast<int64_t>(call.scratch));
    for (const auto output : call.outputs) {
      there_[output] = plan_.asks[output] > 0;
    }
    for (const auto input : call.inputs) {
      if (plan_.asks[input] > 0) {
        answer(input, 1);
      }
    }
  }

  void answer(uint32_t v, uint32_t times) {
    answered_[v] += times;
    there_[v] = there_[v] && answered_[v] < plan_.asks[v];
  }

  // A held one: it must have a place among what is saved.
  void use(uint32_t v, size_t tick) {
    auto index = static_cast<size_t>(step_.trace.values[v].saved);
    if (index == kNone) {
      const auto at = std::ranges::find(plan_.roots, v);
      ASSERT_NE(at, plan_.roots.end());
      index = step_.timeline.saved.size() + static_cast<size_t>(at - plan_.roots.begin());
    }
    ASSERT_NE(plan_.plan.actions[index], Action::recompute);
    uses_[index].first = std::min(uses_[index].first, tick);
    uses_[index].last = std::max(uses_[index].last, tick);
  }

  size_t fetched(uint32_t index) const {
    for (size_t t = 0; t < plan_.plan.fetch.size(); ++t) {
      if (std::ranges::count(plan_.plan.fetch[t], index) > 0) {
        return t;
      }
    }
    return kNever;
  }

  // For our sake, in that interval.
  int64_t held(size_t tick) const {
    int64_t bytes = 0;
    for (uint32_t i = 0; i < uses_.size(); ++i) {
      const auto& saved = plan_.timeline.saved[i];
      if (saved.remade || saved.gone == kNever) {
        continue;
      }
      const bool kept = plan_.plan.actions[i] == Action::keep;
      const auto begin = std::max(gone_from(saved), kept ? size_t{0} : fetched(i));
      const bool in_measured = tick == step_needed(i) && tick == uses_[i].first;
      // One that is moved and makes nothing is fetched again, as it was when that was measured.
      const bool on_board = kept || saved.stays || plan_.plan.stays[i];
      const bool between =
          tick < uses_[i].first || (on_board && tick <= uses_[i].last && !in_measured);
      bytes += begin <= tick && between ? static_cast<int64_t>(saved.bytes) : 0;
    }
    return bytes;
  }

  const Step& step_;
  const FitPlan& plan_;
  std::vector<uint32_t> answered_;  // by value
  std::vector<bool> there_;         // by value: made again, and not let go
  std::vector<Uses> uses_;          // by place among what is saved
  std::vector<int64_t> intervals_;
  int64_t most_ = 0;
};

}  // namespace tenure::offload
