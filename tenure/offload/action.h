// What is done with a saved storage, and why one is kept. Values; no state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tenure::offload {

enum class Action : uint8_t {
  keep,       // stays on the device until backward has used it
  offload,    // rests on the host in between
  recompute,  // is dropped, and made again from what it was made of
};

// Why a saved tensor was kept on the device.
enum class Kept : uint8_t {
  parameter,    // a parameter, a buffer, or a view of one
  small,        // copying it would cost more than it frees
  not_plain,    // a subclass, or a layout without a storage of its own
  elsewhere,    // on another device than those that are offloaded
  lives_on,     // someone else holds its storage until backward anyway
  budget,       // fits into the budget
  host_full,    // the host limit is reached
  disk_full,    // the disk is
  in_backward,  // saved while a backward runs, which is about to need it
  unplanned,    // no plan says what to do with it, and there is room for it
};
inline constexpr size_t kKeptReasons = 10;

// "parameters and buffers", "too small to pay": as a report says it.
const char* kept_text(Kept reason);

}  // namespace tenure::offload
