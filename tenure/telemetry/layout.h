// Layout: which word of the one reduction is which figure. A slot of words, one a key, for all
// ranks together, then one for each stage of the pipeline. Pure functions.
#pragma once

#include <tenure/telemetry/keys.h>
#include <tenure/telemetry/word.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tenure::telemetry {

// The most stages that there may be: each has a slot of its own.
inline constexpr uint32_t kMostStages = 1024;

constexpr size_t words_of(uint32_t stages, size_t keys = kKeys) {
  return (size_t{1} + stages) * keys;
}

// What a rank says into the reduction. REQUIRES: stage < stages, words.size() == words_of(stages).
void write_words(const Row& row, uint32_t rank, uint32_t stage, std::span<int64_t> words);
// The same for any keys and a figure of each, Row::kAbsent where there is none.
void write_words(std::span<const Key> keys, std::span<const int64_t> figures, uint32_t rank,
                 uint32_t stage, std::span<int64_t> words);

// The figure of each word.
std::vector<std::optional<Found>> read_words(std::span<const int64_t> words,
                                             std::span<const Key> of = keys());

// Takes away the interval's peaks among ranks that cannot be told. Where nothing is traced a rank
// knows such a peak only if it is the highest since its start, and says nothing otherwise; then the
// highest of those that were said may be that of another rank. It is not if nobody ever had more.
// `exact`: ranks know those of allocated memory at every interval. `found` is what read_words
// returned.
void drop_unknown_peaks(std::span<std::optional<Found>> found, bool exact);

// All that ranks must agree on to understand each other's words.
std::string layout_text();

// The rank whose memory is highest: on devices if any rank has one, else on hosts. Zero if no rank
// said anything. `found` is what read_words returned.
uint32_t peak_rank(std::span<const std::optional<Found>> found);

}  // namespace tenure::telemetry
