// Word: one rank's figure as an integer whose maximum over all ranks is the figure that is told,
// and says whose it is. Pure functions.
//
// Note [Words]
// Bit 63 is zero, for the maximum of Gloo and of NCCL is that of signed integers. Bits 62 to 20 are
// the value, what is beyond 43 bits being as good as the most; bits 19 to 0 are 2^20 - 1 - rank, so
// that of equal figures the lowest rank's wins. Where the least is wanted the value's complement
// stands for it, and signed values are moved up by 2^42. A rank that has no figure says -1, which
// loses against every figure.
#pragma once

#include <tenure/telemetry/keys.h>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace tenure::telemetry {

inline constexpr int kRankBits = 20;
inline constexpr uint32_t kMostRanks = 1U << kRankBits;
inline constexpr int64_t kMostValue = (int64_t{1} << 43) - 1;
inline constexpr int64_t kBias = int64_t{1} << 42;
inline constexpr int64_t kNoWord = -1;

struct Found {
  int64_t value = 0;
  uint32_t rank = 0;
  bool operator==(const Found&) const = default;
};

// REQUIRES: rank < kMostRanks.
constexpr int64_t pack(const Key& key, std::optional<int64_t> figure, uint32_t rank) {
  if (!figure) {
    return kNoWord;
  }
  auto value = key.is_signed ? std::clamp(*figure, -kBias, kBias - 1) + kBias
                             : std::clamp(*figure, int64_t{0}, kMostValue);
  if (key.extreme == Extreme::lowest) {
    value = kMostValue - value;
  }
  return (value << kRankBits) | (kMostRanks - 1 - rank);
}

constexpr std::optional<Found> unpack(const Key& key, int64_t word) {
  if (word < 0) {
    return std::nullopt;
  }
  auto value = word >> kRankBits;
  if (key.extreme == Extreme::lowest) {
    value = kMostValue - value;
  }
  return Found{.value = key.is_signed ? value - kBias : value,
               .rank = kMostRanks - 1 - static_cast<uint32_t>(word & (kMostRanks - 1))};
}

}  // namespace tenure::telemetry
