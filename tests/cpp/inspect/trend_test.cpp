#include <tenure/inspect/trend.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace tenure::inspect {
namespace {

using Series = std::vector<double>;
using Random = std::mt19937_64;

constexpr double kMegabyte = 1e6;
constexpr double kBase = 500 * kMegabyte;

double number(size_t count) { return static_cast<double>(count); }

template <class Fn>
Series series(size_t steps, Fn&& at) {
  Series out(steps);
  for (size_t i = 0; i < steps; ++i) {
    out[i] = kBase + at(i);
  }
  return out;
}

size_t pick(Random& random, size_t least, size_t most) {
  return std::uniform_int_distribution<size_t>(least, most)(random);
}

double between(Random& random, double least, double most) {
  return std::uniform_real_distribution<double>(least, most)(random);
}

double normal(Random& random, double deviation) {
  return std::normal_distribution<double>(0, deviation)(random);
}

Series with_noise(Series values, double deviation, Random& random) {
  for (auto& value : values) {
    value += normal(random, deviation);
  }
  return values;
}

Series line(size_t steps, double per_step) {
  return series(steps, [&](size_t i) { return per_step * number(i); });
}

Series staircase(size_t steps, size_t every) {
  return series(steps, [&](size_t i) { return kMegabyte * number(i / every); });
}

Series sawtooth(size_t steps, size_t period) {
  return series(steps, [&](size_t i) { return kMegabyte * number(i % period); });
}

Series warm_up(size_t steps, double length) {
  return series(steps,
                [&](size_t i) { return 100 * kMegabyte * (1 - std::exp(-number(i) / length)); });
}

// Each step asks for some of `keys` things, and what was asked for once is kept.
Series cache(size_t steps, size_t keys, size_t asked, Random& random) {
  std::set<size_t> known;
  return series(steps, [&](size_t) {
    for (size_t i = 0; i < asked; ++i) {
      known.insert(pick(random, 0, keys - 1));
    }
    return kMegabyte * number(known.size());
  });
}

Series filled_by(size_t steps, size_t full) {
  return series(steps, [&](size_t i) { return kMegabyte * number(std::min(i, full)); });
}

Series jumps(size_t steps, std::vector<size_t> at) {
  return series(steps, [&](size_t i) {
    return 20 * kMegabyte * number(static_cast<size_t>(std::ranges::count_if(at, [&](size_t jump) {
             return i >= jump;
           })));
  });
}

Series late(size_t steps, size_t onset) {
  return series(steps, [&](size_t i) { return kMegabyte * number(i < onset ? 0 : i - onset); });
}

TEST(Trend, AConstantDoesNotGrow) {
  const auto trend = trend_of(Series(200, kBase));
  EXPECT_FALSE(trend.grows);
  EXPECT_EQ(trend.confidence, 0);
  EXPECT_EQ(trend.per_step, 0);
}

TEST(Trend, NoiseDoesNotGrow) {
  Random random(1);
  EXPECT_FALSE(trend_of(with_noise(Series(300, kBase), 5 * kMegabyte, random)).grows);
}

TEST(Trend, NoiseOfFewStepsDoesNotGrow) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    Random random(seed);
    const auto values = with_noise(Series(pick(random, 12, 30), kBase), 5 * kMegabyte, random);
    EXPECT_FALSE(trend_of(values).grows) << values.size() << " steps, seed " << seed;
  }
}

TEST(Trend, NoiseThatWandersDoesNotGrow) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    double at = 0;
    const auto values = series(200, [&](size_t) {
      at = 0.7 * at + normal(random, 5 * kMegabyte);
      return at;
    });
    EXPECT_FALSE(trend_of(values).grows) << "seed " << seed;
  }
}

TEST(Trend, AFallDoesNotGrow) { EXPECT_FALSE(trend_of(line(200, -kMegabyte)).grows); }

TEST(Trend, ALineGrowsAtItsPaceFromItsBeginning) {
  const auto trend = trend_of(line(100, kMegabyte));
  EXPECT_TRUE(trend.grows);
  EXPECT_NEAR(trend.per_step, kMegabyte, 0.01 * kMegabyte);
  EXPECT_GT(trend.confidence, 0.99);
  EXPECT_LE(trend.confidence, 1);
  EXPECT_LE(trend.since, 5);
}

TEST(Trend, ALineWithNoiseGrowsAtItsPace) {
  Random random(2);
  const auto trend = trend_of(with_noise(line(200, kMegabyte), 5 * kMegabyte, random));
  EXPECT_TRUE(trend.grows);
  EXPECT_NEAR(trend.per_step, kMegabyte, 0.15 * kMegabyte);
}

TEST(Trend, FewestStepsAreEnoughForALineAndOneLessIsNot) {
  EXPECT_TRUE(trend_of(line(kFewestSteps, kMegabyte)).grows);
  EXPECT_FALSE(trend_of(line(kFewestSteps - 1, kMegabyte)).grows);
  EXPECT_FALSE(trend_of({}).grows);
}

TEST(Trend, GrowthBelowTheLeastIsNone) {
  EXPECT_FALSE(trend_of(line(200, 512)).grows);
  EXPECT_TRUE(trend_of(line(200, 512), {.least_per_step = 256}).grows);
  EXPECT_TRUE(trend_of(line(200, 4096)).grows);
}

TEST(Trend, AStaircaseEverySecondStepGrows) {
  const auto trend = trend_of(staircase(60, 2));
  EXPECT_TRUE(trend.grows);
  EXPECT_NEAR(trend.per_step, kMegabyte / 2, 0.1 * kMegabyte);
}

TEST(Trend, AStaircaseEveryFifthStepGrows) {
  const auto trend = trend_of(staircase(100, 5));
  EXPECT_TRUE(trend.grows);
  EXPECT_NEAR(trend.per_step, kMegabyte / 5, 0.05 * kMegabyte);
}

TEST(Trend, ASawtoothDoesNotGrowWithItsLastToothOpen) {
  for (size_t open = 0; open < 50; ++open) {
    EXPECT_FALSE(trend_of(sawtooth(150 + open, 50)).grows) << open << " steps into a tooth";
  }
}

TEST(Trend, ATenTimesHigherToothIsNoTooth) {
  auto values = sawtooth(200, 20);
  for (size_t i = 100; i < values.size(); ++i) {
    values[i] = kBase + 2 * kMegabyte * number(i - 100);
  }
  EXPECT_TRUE(trend_of(values).grows);
}

TEST(Trend, AWarmUpThatEndsDoesNotGrow) { EXPECT_FALSE(trend_of(warm_up(200, 15)).grows); }

TEST(Trend, ACacheThatLevelsOffDoesNotGrow) {
  Random random(3);
  EXPECT_FALSE(trend_of(cache(300, 200, 3, random)).grows);
}

TEST(Trend, AReplayBufferThatIsFullDoesNotGrow) {
  EXPECT_FALSE(trend_of(filled_by(300, 100)).grows);
}

TEST(Trend, GrowthThatStoppedDoesNotGrow) {
  for (size_t full = 100; full <= 260; full += 5) {
    EXPECT_FALSE(trend_of(filled_by(300, full)).grows) << "stopped at " << full;
  }
}

// What an allocator keeps is the most that was ever needed. Some records come as if by the clock.
TEST(Trend, HighWaterMarksHardlyEverGrow) {
  size_t grown = 0;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Random random(seed);
    double most = 0;
    const auto values = series(200, [&](size_t) {
      most = std::max(most, std::abs(normal(random, 20 * kMegabyte)));
      return most;
    });
    grown += static_cast<size_t>(trend_of(values).grows);
  }
  EXPECT_LE(grown, 10);
}

TEST(Trend, AReplayBufferThatStillFillsGrows) { EXPECT_TRUE(trend_of(filled_by(300, 300)).grows); }

TEST(Trend, ALateOnsetIsFoundWhereItIs) {
  const auto trend = trend_of(late(200, 120));
  EXPECT_TRUE(trend.grows);
  EXPECT_NEAR(number(trend.since), 120, 12);
  EXPECT_NEAR(trend.per_step, kMegabyte, 0.1 * kMegabyte);
}

TEST(Trend, OneJumpDoesNotGrow) {
  for (size_t at = 1; at < 100; ++at) {
    EXPECT_FALSE(trend_of(jumps(100, {at})).grows) << "at " << at;
  }
}

TEST(Trend, FewJumpsDoNotGrow) {
  EXPECT_FALSE(trend_of(jumps(100, {20, 70})).grows);
  EXPECT_FALSE(trend_of(jumps(100, {10, 40, 45, 80})).grows);
  EXPECT_FALSE(trend_of(jumps(100, {60, 70, 80, 90})).grows);
}

TEST(Trend, AJumpIsNoPartOfTheGrowthAroundIt) {
  auto values = line(100, kMegabyte);
  for (size_t i = 50; i < values.size(); ++i) {
    values[i] += 500 * kMegabyte;
  }
  const auto trend = trend_of(values);
  EXPECT_TRUE(trend.grows);
  EXPECT_NEAR(trend.per_step, kMegabyte, 0.2 * kMegabyte);
}

TEST(Trend, DipsHideNoGrowth) {
  auto values = line(100, kMegabyte);
  for (const size_t at : {30, 55, 56, 90}) {
    values[at] -= 400 * kMegabyte;
  }
  EXPECT_TRUE(trend_of(values).grows);
}

TEST(Trend, DipsAndSpikesAreNoGrowth) {
  Series values(100, kBase);
  for (const size_t at : {10, 30, 31, 60}) {
    values[at] -= 400 * kMegabyte;
    values[at + 5] += 400 * kMegabyte;
  }
  values.back() += 400 * kMegabyte;
  EXPECT_FALSE(trend_of(values).grows);
}

TEST(Trend, AMillionStepsAreJudgedAtOnce) {
  const size_t million = 1'000'000;
  const auto leaky = line(million, 1e4);
  const auto healthy = sawtooth(million, 1000);
  const auto begin = std::chrono::steady_clock::now();
  const auto trend = trend_of(leaky);
  const bool grows = trend_of(healthy).grows;
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
  EXPECT_TRUE(trend.grows);
  EXPECT_NEAR(trend.per_step, 1e4, 100);
  EXPECT_FALSE(grows);
  EXPECT_LT(spent.count(), 2) << "a test of every pair would take hours";
}

struct Shape {
  const char* name;
  Series (*make)(size_t steps, Random& random);
};

constexpr std::array kHealthy{
    Shape{"constant", [](size_t steps, Random&) { return Series(steps, kBase); }},
    Shape{"noise",
          [](size_t steps, Random& random) {
            return with_noise(Series(steps, kBase), between(random, 0.01, 20.0) * kMegabyte,
                              random);
          }},
    Shape{"sawtooth",
          [](size_t steps, Random& random) { return sawtooth(steps, pick(random, 4, steps / 3)); }},
    Shape{"noisy sawtooth",
          [](size_t steps, Random& random) {
            const size_t period = pick(random, 8, steps / 3);
            return with_noise(sawtooth(steps, period), 0.02 * number(period) * kMegabyte, random);
          }},
    Shape{"warm-up",
          [](size_t steps, Random& random) {
            return warm_up(steps, number(steps) * between(random, 0.01, 0.1));
          }},
    Shape{"noisy warm-up",
          [](size_t steps, Random& random) {
            return with_noise(warm_up(steps, number(steps) * between(random, 0.01, 0.1)), kMegabyte,
                              random);
          }},
    Shape{"cache",
          [](size_t steps, Random& random) {
            const size_t asked = pick(random, 1, 8);
            return cache(steps, asked * steps / pick(random, 4, 10), asked, random);
          }},
    Shape{"replay buffer",
          [](size_t steps, Random& random) {
            return filled_by(steps, pick(random, steps / 10, steps / 3));
          }},
    Shape{"few jumps",
          [](size_t steps, Random& random) {
            std::vector<size_t> at(pick(random, 1, 4));
            std::ranges::generate(at, [&] { return pick(random, 1, steps - 1); });
            return jumps(steps, at);
          }},
    Shape{"spikes and dips",
          [](size_t steps, Random& random) {
            Series values(steps, kBase);
            for (auto& value : values) {
              value += pick(random, 0, 19) == 0 ? normal(random, 100 * kMegabyte) : 0;
            }
            return values;
          }},
};

constexpr std::array kLeaky{
    Shape{"line",
          [](size_t steps, Random& random) {
            return line(steps, between(random, 0.003, 10.0) * kMegabyte);
          }},
    Shape{"noisy line",
          [](size_t steps, Random& random) {
            return with_noise(line(steps, kMegabyte), between(random, 0.1, 3.0) * kMegabyte,
                              random);
          }},
    Shape{"staircase",
          [](size_t steps, Random& random) { return staircase(steps, pick(random, 2, 5)); }},
    Shape{"haphazard",
          [](size_t steps, Random& random) {
            double held = 0;
            return series(steps, [&](size_t) {
              held += pick(random, 0, 2) == 0 ? between(random, 0.5, 2.0) * kMegabyte : 0;
              return held;
            });
          }},
    Shape{"late onset",
          [](size_t steps, Random& random) { return late(steps, pick(random, 0, steps / 2)); }},
    Shape{"after a warm-up",
          [](size_t steps, Random& random) {
            auto values = warm_up(steps, number(steps) * between(random, 0.01, 0.04));
            for (size_t i = 0; i < steps; ++i) {
              values[i] += kMegabyte * number(i);
            }
            return values;
          }},
    Shape{"with a jump",
          [](size_t steps, Random& random) {
            auto values = jumps(steps, {pick(random, 1, steps - 1)});
            for (size_t i = 0; i < steps; ++i) {
              values[i] += kMegabyte * number(i);
            }
            return values;
          }},
    Shape{"beneath a sawtooth",
          [](size_t steps, Random& random) {
            auto values = sawtooth(steps, pick(random, 4, 10));
            for (size_t i = 0; i < steps; ++i) {
              values[i] += kMegabyte * number(i);
            }
            return values;
          }},
};

TEST(Trend, OfAThousandHealthySeriesNoneGrows) {
  for (size_t seed = 0; seed < 1000; ++seed) {
    Random random(seed);
    const auto& shape = kHealthy[seed % kHealthy.size()];
    const size_t steps = pick(random, 60, 600);
    EXPECT_FALSE(trend_of(shape.make(steps, random)).grows)
        << shape.name << ", " << steps << " steps, seed " << seed;
  }
}

TEST(Trend, OfAThousandLeakySeriesNearlyAllGrow) {
  size_t found = 0;
  std::string missed;
  for (size_t seed = 0; seed < 1000; ++seed) {
    Random random(seed);
    const auto& shape = kLeaky[seed % kLeaky.size()];
    const size_t steps = pick(random, 60, 600);
    const bool grows = trend_of(shape.make(steps, random)).grows;
    found += static_cast<size_t>(grows);
    missed += grows ? "" : std::string(shape.name) + " " + std::to_string(seed) + "; ";
  }
  EXPECT_GE(found, 990) << missed;
}

}  // namespace
}  // namespace tenure::inspect
