// The learning rate of a step: up in a line while warming up, then down half a cosine. Pure.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace tenure::train {

struct Schedule {
  double peak = 6e-4;
  double least = 0;     // where the cosine ends
  int64_t warm_up = 0;  // steps
  int64_t steps = 0;    // of the whole run; beyond them the rate stays at the least
};

// Of the step with this number, the first being 0. The last step of the warm-up has the peak.
inline double learning_rate(const Schedule& schedule, int64_t step) {
  if (step < schedule.warm_up) {
    return schedule.peak * static_cast<double>(step + 1) / static_cast<double>(schedule.warm_up);
  }
  if (step >= schedule.steps) {
    return schedule.least;
  }
  const auto done = static_cast<double>(step - schedule.warm_up) /
                    static_cast<double>(schedule.steps - schedule.warm_up);
  const auto left = (1 + std::cos(std::numbers::pi * done)) / 2;
  return schedule.least + left * (schedule.peak - schedule.least);
}

}  // namespace tenure::train
