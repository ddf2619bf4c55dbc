#include <tenure/telemetry/keys.h>

#include <algorithm>

namespace tenure::telemetry {
namespace {

constexpr auto kHigh = Extreme::highest;
constexpr auto kLow = Extreme::lowest;

// In the order of K.
constexpr std::array<Key, kKeys> kAll = {{
    {"device_allocated_bytes", Unit::bytes, kHigh, false, "Device memory in tensors"},
    {"device_active_bytes", Unit::bytes, kHigh, false,
     "Device memory in tensors, or freed but still in use by a stream"},
    {"device_inactive_bytes", Unit::bytes, kHigh, false,
     "Free remainders of split blocks, which cannot go back to the driver"},
    {"device_reserved_bytes", Unit::bytes, kHigh, false,
     "Device memory that the allocator has taken from the driver"},
    {"device_allocated_peak_bytes", Unit::bytes, kHigh, false,
     "Most device memory in tensors since the last interval"},
    {"device_active_peak_bytes", Unit::bytes, kHigh, false,
     "Most active device memory since the last interval"},
    {"device_inactive_peak_bytes", Unit::bytes, kHigh, false,
     "Most in free remainders of split blocks since the last interval"},
    {"device_reserved_peak_bytes", Unit::bytes, kHigh, false,
     "Most device memory reserved since the last interval"},
    {"device_allocated_top_bytes", Unit::bytes, kHigh, false,
     "Most device memory in tensors since the start"},
    {"device_active_top_bytes", Unit::bytes, kHigh, false,
     "Most active device memory since the start"},
    {"device_inactive_top_bytes", Unit::bytes, kHigh, false,
     "Most in free remainders of split blocks since the start"},
    {"device_reserved_top_bytes", Unit::bytes, kHigh, false,
     "Most device memory reserved since the start"},
    {"device_blocks", Unit::count, kHigh, false,
     "Blocks of device memory in tensors, as the allocator counts them"},
    {"device_retries", Unit::count, kHigh, false,
     "Allocations that succeeded only after the cache was emptied"},
    {"device_ooms", Unit::count, kHigh, false, "Out-of-memory errors of the device's allocator"},
    {"device_fragmentation_permille", Unit::permille, kHigh, false,
     "Part of the reserved device memory that lies in remainders of split blocks"},
    {"device_free_bytes", Unit::bytes, kLow, false, "Free device memory as the driver sees it"},
    {"device_total_bytes", Unit::bytes, kHigh, false, "Memory of the device"},
    {"device_others_bytes", Unit::bytes, kHigh, false,
     "Device memory of other processes and of the driver itself"},
    {"device_headroom_bytes", Unit::bytes, kLow, false,
     "What tensors can still get: free at the driver, or whole blocks in the allocator's cache"},
    {"device_headroom_permille", Unit::permille, kLow, false,
     "Headroom as a part of the device's memory"},
    {"host_rss_bytes", Unit::bytes, kHigh, false, "Resident memory of the process"},
    {"host_rss_peak_bytes", Unit::bytes, kHigh, false,
     "Most resident memory since the last interval"},
    {"host_rss_top_bytes", Unit::bytes, kHigh, false,
     "Most resident memory since the program began"},
    {"host_pss_bytes", Unit::bytes, kHigh, false,
     "Resident memory, pages shared with n processes counted as 1/n"},
    {"host_shared_bytes", Unit::bytes, kHigh, false, "Resident shared memory: memfd, /dev/shm"},
    {"host_swap_bytes", Unit::bytes, kHigh, false, "Swapped out"},
    {"host_pinned_bytes", Unit::bytes, kHigh, false,
     "Page-locked host memory, cached blocks included"},
    {"host_pinned_active_bytes", Unit::bytes, kHigh, false, "Page-locked host memory in use"},
    {"host_available_bytes", Unit::bytes, kLow, false,
     "Memory of the machine that programs could still take"},
    {"host_limit_bytes", Unit::bytes, kLow, false,
     "The limit that is reached first: the machine's, the control group's or a ulimit"},
    {"host_headroom_bytes", Unit::bytes, kLow, false,
     "What is left of the limit that is reached first, before the kernel kills or refuses"},
    {"host_headroom_permille", Unit::permille, kLow, false, "Headroom as a part of the limit"},
    {"parameters_bytes", Unit::bytes, kHigh, false, "Leased as parameters"},
    {"gradients_bytes", Unit::bytes, kHigh, false, "Leased as gradients"},
    {"optimizer_bytes", Unit::bytes, kHigh, false, "Leased as optimizer states"},
    {"activations_bytes", Unit::bytes, kHigh, false, "Leased as activations"},
    {"offloaded_bytes", Unit::bytes, kHigh, false, "Leased as host copies of activations"},
    {"receive_buffers_bytes", Unit::bytes, kHigh, false, "Leased as receive buffers"},
    {"stored_objects_bytes", Unit::bytes, kHigh, false,
     "In the store for other processes, or kept from it"},
    {"other_bytes", Unit::bytes, kHigh, false, "Leased as anything else"},
    {"leases", Unit::count, kHigh, false, "Leases alive"},
    {"bound_bytes", Unit::bytes, kHigh, false, "What the parts in use have promised to keep below"},
    {"device_growth_bytes_per_step", Unit::bytes_per_step, kHigh, true,
     "Growth of device memory that is allocated or lost in remainders of split blocks"},
    {"host_growth_bytes_per_step", Unit::bytes_per_step, kHigh, true, "Growth of resident memory"},
    {"steps_left", Unit::steps, kLow, false, "Steps until memory runs out at the present growth"},
    {"steps_left_earliest", Unit::steps, kLow, false, "The same at the fastest likely growth"},
    {"steps_left_latest", Unit::steps, kLow, false, "The same at the slowest likely growth"},
    {"step", Unit::steps, kLow, false, "The step that a rank has ended"},
    {"step_microseconds", Unit::microseconds, kHigh, false, "Time of a step, over the interval"},
}};

}  // namespace

std::string_view unit_name(Unit unit) {
  switch (unit) {
    case Unit::bytes:
      return "bytes";
    case Unit::bytes_per_step:
      return "bytes per step";
    case Unit::permille:
      return "permille";
    case Unit::count:
      return "count";
    case Unit::steps:
      return "steps";
    case Unit::microseconds:
      return "microseconds";
  }
  return "";
}

const std::array<Key, kKeys>& keys() { return kAll; }

std::optional<K> key_named(std::string_view name) {
  const auto* found = std::ranges::find(kAll, name, &Key::name);
  return found == kAll.end() ? std::nullopt : std::optional(static_cast<K>(found - kAll.begin()));
}

}  // namespace tenure::telemetry
