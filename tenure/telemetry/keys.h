// Keys: what a rank tells of itself at each interval, in a fixed order. A row is one rank's figures
// at one step; a figure that this machine does not give is absent, never zero.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string_view>

namespace tenure::telemetry {

enum class Unit : uint8_t { bytes, bytes_per_step, permille, count, steps, microseconds };
std::string_view unit_name(Unit unit);

// Of all ranks' figures, the one that is told.
enum class Extreme : uint8_t { highest, lowest };

struct Key {
  std::string_view name;  // ends in its unit, where it has one
  Unit unit;
  Extreme extreme;
  bool is_signed;
  std::string_view help;  // one sentence without its full stop
};

enum class K : uint8_t {
  device_allocated,
  device_active,
  device_inactive,
  device_reserved,
  device_allocated_peak,
  device_active_peak,
  device_inactive_peak,
  device_reserved_peak,
  device_allocated_top,
  device_active_top,
  device_inactive_top,
  device_reserved_top,
  device_blocks,
  device_retries,
  device_ooms,
  device_fragmentation,
  device_free,
  device_total,
  device_others,
  device_headroom,
  device_headroom_share,
  host_rss,
  host_rss_peak,
  host_rss_top,
  host_pss,
  host_shared,
  host_swap,
  host_pinned,
  host_pinned_active,
  host_available,
  host_limit,
  host_headroom,
  host_headroom_share,
  parameters,
  gradients,
  optimizer,
  activations,
  offloaded,
  receive_buffers,
  stored_objects,
  other,
  leases,
  bound,
  device_growth,
  host_growth,
  steps_left,
  steps_left_earliest,
  steps_left_latest,
  step,
  step_time,
};
inline constexpr size_t kKeys = static_cast<size_t>(K::step_time) + 1;

const std::array<Key, kKeys>& keys();
// None of that name: nullopt.
std::optional<K> key_named(std::string_view name);

struct Row {
  static constexpr int64_t kAbsent = std::numeric_limits<int64_t>::min();

  uint64_t step = 0;
  int64_t when = 0;  // nanoseconds since 1970
  std::array<int64_t, kKeys> figures;

  Row() { figures.fill(kAbsent); }
  std::optional<int64_t> get(K key) const {
    const auto value = figures[static_cast<size_t>(key)];
    return value == kAbsent ? std::nullopt : std::optional(value);
  }
  void set(K key, std::optional<int64_t> value) {
    figures[static_cast<size_t>(key)] = value.value_or(kAbsent);
  }
};

}  // namespace tenure::telemetry
