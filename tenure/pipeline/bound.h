// Bound: the most memory that a rank may need if it keeps to its schedule. Pure; any thread.
#pragma once

#include <tenure/pipeline/schedule.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tenure::pipeline {

// Microbatches of one stage that a rank has begun and not ended, counted for each of its stages.
struct InFlight {
  uint32_t whole = 0;    // forward is done, no backward yet
  uint32_t waiting = 0;  // the gradients of the input are done, those of the weights are not
  uint32_t all() const { return whole + waiting; }

  bool operator==(const InFlight&) const = default;
};

// What one microbatch takes on one stage.
struct MicrobatchBytes {
  int64_t whole = 0;
  int64_t waiting = 0;
};

// After each action of a rank, over all its stages.
std::vector<InFlight> in_flight(const Schedule& schedule, uint32_t rank);
// The moment with the most in flight, whole ones first among equals.
InFlight most_in_flight(const Schedule& schedule, uint32_t rank);

// Bytes after each action, with those of a microbatch on each of the rank's stages, in the order of
// Schedule::stages_of.
std::vector<int64_t> levels(const Schedule& schedule, uint32_t rank,
                            std::span<const MicrobatchBytes> bytes);
int64_t peak_bytes(const Schedule& schedule, uint32_t rank, std::span<const MicrobatchBytes> bytes);

}  // namespace tenure::pipeline
