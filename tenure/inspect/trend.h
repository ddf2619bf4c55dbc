// Trend: does a series of bytes, one value a step, grow for good? Pure functions, any thread.
//
// Note [What counts as growth]
// A leak is not "the end is higher than the beginning": warm-up, a cache that fills, a buffer that
// is flushed now and then and one evaluation too many all end higher. What a leak has and they
// have not:
//   - Never given back. Judged is the lower envelope seen from the end: the least value from here
//     on. A sawtooth has a flat one, except for the tooth that is still open, and an open tooth
//     that is no longer and no higher than one that was given back earlier proves nothing.
//   - Many rises. One-time buffers come in a stair or a few; growth must be left when the four
//     largest rises are no higher than the fifth.
//   - Beyond chance and noise: a rank test (Kendall's tau, which heavy tails do not impress) and
//     a height well above the noise of the blocks that the steps are gathered in.
//   - Still going on, at about the same pace. Growth that levels off has its centre of mass early
//     in the window, and is slower now than it was before the window; growth that stopped has not
//     risen for much longer than its rises were apart.
//   - Long enough: it began at least ten steps and a fifth of the run ago.
// A run that ends while something fills at a steady pace is growth: nothing can tell them apart.
#pragma once

#include <cstddef>
#include <span>

namespace tenure::inspect {

// Fewer values than this are never growth. Counted after whatever warm-up the caller leaves out.
inline constexpr size_t kFewestSteps = 12;

struct TrendOptions {
  // Slower growth is none. A list of detached scalars (512 bytes each on a GPU) is below it.
  double least_per_step = 2048;
};

struct Trend {
  bool grows = false;
  double per_step = 0;    // typical growth per step since `since`; one-time jumps left out
  double confidence = 0;  // 0 to 1: how sure the growth is. 0 unless it grows
  size_t since = 0;       // the index at which the growth began
};

// Theil and Sen's slope, which a few wild values do not bend: the median over all pairs of values,
// of long series over pairs of some. 0 for fewer than two.
double slope_of(std::span<const double> values);

// One finite value for each step, at the step's end. Above a few hundred steps they are thinned, so
// that a million takes some milliseconds; `since` is then as coarse as that.
Trend trend_of(std::span<const double> values, const TrendOptions& options = {});

}  // namespace tenure::inspect
