// Random steps: what plans must hold for whatever the model is.
#pragma once

#include "step.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace tenure::offload {

// A forward of random calls, and a backward that needs what they saved about in reverse.
class Dice {
 public:
  explicit Dice(unsigned seed, uint64_t most_calls = 40) : dice_(seed), most_(most_calls) {}

  Step step() {
    for (size_t i = 0; i < 3; ++i) {
      step_.trace.values.push_back({.bytes = number(100), .steady = number(8) > 1});
    }
    const auto calls = 5 + number(most_);
    for (size_t i = 0; i < calls; ++i) {
      add_call();
    }
    need_all();
    measure();
    return step_;
  }

 private:
  uint64_t number(uint64_t below) { return dice_() % below; }

  void add_call() {
    auto& values = step_.trace.values;
    CallTrace call{.inputs = {},
                   .outputs = {},
                   .seconds = static_cast<double>(number(100)) * 1e-6,
                   .scratch = number(3) == 0 ? number(200) : 0,
                   .repeatable = number(6) != 0};
    for (auto i = 1 + number(3); i > 0; --i) {
      const auto far = number(4) == 0 ? values.size() : std::min<size_t>(values.size(), 6);
      call.inputs.push_back(static_cast<uint32_t>(values.size() - 1 - number(far)));
    }
    std::ranges::sort(call.inputs);
    const auto twice = std::ranges::unique(call.inputs);
    call.inputs.erase(twice.begin(), twice.end());
    for (auto i = 1 + number(4) / 3; i > 0; --i) {
      call.outputs.push_back(static_cast<uint32_t>(values.size()));
      values.push_back({.bytes = 1 + number(1000),
                        .call = static_cast<uint32_t>(step_.trace.calls.size()),
                        .born = std::max<size_t>(ticks_, 1) - 1,
                        .steady = number(10) != 0});
    }
    step_.trace.calls.push_back(call);
    if (number(3) != 0) {
      save(static_cast<uint32_t>(values.size() - 1 - number(std::min<size_t>(values.size(), 4))));
    }
  }

  void save(uint32_t value) {
    auto& of = step_.trace.values[value];
    if (of.saved == kNone) {
      of.saved = static_cast<uint32_t>(step_.timeline.saved.size());
      step_.timeline.saved.push_back({.bytes = of.bytes, .saved = ticks_++});
    }
  }

  void need_all() {
    auto& saved = step_.timeline.saved;
    std::vector<size_t> order(saved.size());
    std::iota(order.rbegin(), order.rend(), size_t{0});
    for (size_t i = 1; i < order.size(); ++i) {
      if (number(4) == 0) {
        std::swap(order[i - 1], order[i]);
      }
    }
    const auto end = ticks_ + saved.size();
    for (const auto i : order) {
      saved[i].needed = saved[i].last = ticks_++;
      saved[i].uses = 1;
      if (number(4) == 0) {
        saved[i].uses = static_cast<uint32_t>(1 + number(3));
        saved[i].last = std::min(saved[i].needed + number(4), end - 1);
        saved[i].last = saved[i].uses == 1 ? saved[i].needed : saved[i].last;
      }
    }
  }

  void measure() {
    auto& timeline = step_.timeline;
    for (size_t t = 0; t < ticks_; ++t) {
      timeline.level.push_back(static_cast<int64_t>(1000 + number(500)));
      timeline.peak.push_back(timeline.level.back() + static_cast<int64_t>(number(1000)));
    }
    for (auto& value : step_.trace.values) {
      value.gone = number(10) == 0 ? kNever : value.born + 1 + number(3);
      if (value.saved != kNone) {
        timeline.saved[value.saved].gone = value.gone;
      }
    }
    if (number(4) == 0) {
      timeline.level.clear();
    }
  }

  std::mt19937 dice_;
  uint64_t most_;
  Step step_;
  size_t ticks_ = 0;
};

}  // namespace tenure::offload
