#include <tenure/offload/choice.h>

#include "random_step.h"
#include <tenure/offload/planner.h>

#include <gtest/gtest.h>

#include <algorithm>

namespace tenure::offload {
namespace {

constexpr double kPrice = 3e-7;

bool can_be_made(const Step& step, uint32_t value) {
  const auto& of = step.trace.values[value];
  if (of.call == kNone || !of.steady) {
    return false;
  }
  const auto& call = step.trace.calls[of.call];
  return call.repeatable && std::ranges::all_of(call.inputs, [&](uint32_t input) {
           return step.trace.values[input].steady;
         });
}

bool is_free(const Step& step, uint32_t value) {
  const auto& of = step.trace.values[value];
  return of.gone == kNever || (of.saved != kNone && gone_from(step.timeline.saved[of.saved]) >=
                                                        step.timeline.saved[of.saved].needed);
}

// What it costs to hold all that is needed and not made again, and to make the others.
double cost(const Step& step, const std::vector<bool>& remade) {
  std::vector<uint32_t> needed;
  std::vector<bool> seen(remade.size());
  std::vector<bool> repeated(step.trace.calls.size());
  const auto need = [&](uint32_t value) {
    if (!seen[value]) {
      seen[value] = true;
      needed.push_back(value);
    }
  };
  for (uint32_t v = 0; v < remade.size(); ++v) {
    if (step.trace.values[v].saved != kNone) {
      need(v);
    }
  }
  double cost = 0;
  while (!needed.empty()) {
    const auto v = needed.back();
    needed.pop_back();
    const auto& value = step.trace.values[v];
    if (!remade[v]) {
      cost += is_free(step, v) ? 0 : static_cast<double>(value.bytes) * kPrice;
    } else if (!repeated[value.call]) {
      repeated[value.call] = true;
      cost += remake_seconds(step.trace.calls[value.call]);
      std::ranges::for_each(step.trace.calls[value.call].inputs, need);
    }
  }
  return cost;
}

// All choices there are.
double least_cost(const Step& step) {
  std::vector<uint32_t> may;
  for (uint32_t v = 0; v < step.trace.values.size(); ++v) {
    if (can_be_made(step, v)) {
      may.push_back(v);
    }
  }
  double least = 1e300;
  for (uint32_t bits = 0; bits < 1U << may.size(); ++bits) {
    std::vector<bool> remade(step.trace.values.size());
    for (size_t i = 0; i < may.size(); ++i) {
      remade[may[i]] = ((bits >> i) & 1U) != 0;
    }
    least = std::min(least, cost(step, remade));
  }
  return least;
}

TEST(Choice, IsTheBestOfAll) {
  size_t remade = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const auto step = Dice(seed, 5).step();
    const Choice choice(step.timeline, step.trace);
    const auto chosen = choice.at({.after = kPrice}, choice.borders().front());
    EXPECT_NEAR(cost(step, chosen), least_cost(step), 1e-9);
    remade += static_cast<size_t>(std::ranges::count(chosen, true));
  }
  EXPECT_GT(remade, 20U);
}

// Note [Between two choices]: with those of a lower and a higher price it is the same as without.
TEST(Choice, GrowsWithThePrice) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const auto step = Dice(seed, seed % 10 == 0 ? 400 : 40).step();
    const Choice choice(step.timeline, step.trace);
    for (const auto& border : choice.borders()) {
      const auto less = choice.at({.after = kPrice / 4}, border);
      const auto more = choice.at({.after = kPrice * 4}, border);
      const auto same = choice.at({.after = kPrice}, border);
      EXPECT_EQ(choice.between(less, more, {.after = kPrice}, border), same);
      for (size_t v = 0; v < same.size(); ++v) {
        EXPECT_TRUE((!less[v] || same[v]) && (!same[v] || more[v]));
      }
    }
  }
}

TEST(Choice, MakesNothingAgainAcrossABorder) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    const auto step = Dice(seed).step();
    const Choice choice(step.timeline, step.trace);
    for (const auto& border : choice.borders()) {
      const auto chosen = choice.at({.after = 1}, border);
      for (size_t v = 0; v < chosen.size(); ++v) {
        EXPECT_FALSE(chosen[v] && border[v]);
      }
    }
  }
}

TEST(Choice, BeforeATickTheOtherPriceHolds) {
  const auto step = Dice(3).step();
  const Choice choice(step.timeline, step.trace);
  const auto& border = choice.borders().front();
  const auto end = step.timeline.ticks();
  EXPECT_EQ(choice.at({.before = kPrice, .after = 0, .tick = end}, border),
            choice.at({.before = 0, .after = kPrice, .tick = 0}, border));
}

}  // namespace
}  // namespace tenure::offload
