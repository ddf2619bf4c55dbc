// Meter: how much of a device's memory its allocator has given out: now, and at most since the last
// reading. Every meter has its own "last", and none disturbs the allocator's own peaks, which
// belong to the user.
//
// Where someone tells of each allocation (libtenure_cuda does, for CUDA) the peak is exact but for
// what the allocator rounds up between two readings: CUDA's up to 1 MiB an allocation. Elsewhere it
// is sampled: the allocator's own peak if that rose, else the higher of two readings. Nobody counts
// what the CPU's allocator gives out but while a HostCount lives; then the figures are those of the
// tensors that were born meanwhile, exact.
//
// A meter belongs to one thread at a time; device_allocated may be called from any.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace tenure {

class Meter {
 public:
  struct Level;
  enum class Precision : uint8_t { none, sampled, traced };
  struct Reading {
    int64_t current = 0;
    int64_t peak = 0;
    int64_t asked = 0;  // what `current` was before the allocator rounded up
  };

  explicit Meter(c10::Device device);
  ~Meter();
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;

  // Zeros where there is nobody to ask: the CPU, without a HostCount.
  Reading read();
  Precision precision() const { return precision_; }
  c10::Device device() const { return device_; }

 private:
  c10::Device device_;
  Precision precision_ = Precision::none;
  Level* level_ = nullptr;  // one of a fixed number that live for ever
  Reading last_;
  int64_t last_own_peak_ = 0;
};

// Has CPU tensors counted that are born while one of these lives, at the cost of a look into a
// table for each birth and death. Any thread.
class HostCount {
 public:
  // Throws Error if torch's CPU allocator is one that cannot be wrapped.
  HostCount();
  ~HostCount();
  HostCount(const HostCount&) = delete;
  HostCount& operator=(const HostCount&) = delete;
};

// Bytes of CPU tensors that were born while a HostCount lived and have not died.
int64_t host_counted();

// Counts those of them apart that are born on a thread that is in it, for who answers for no other.
// They may die on any. One thread reads.
class OwnCount {
 public:
  struct Tally;

  // Throws as HostCount does.
  OwnCount();
  ~OwnCount();
  OwnCount(const OwnCount&) = delete;
  OwnCount& operator=(const OwnCount&) = delete;

  Meter::Reading read();

  // This thread is in `count`, and in no other one, while it lives. Inner ones end first.
  class Here {
   public:
    explicit Here(OwnCount& count);
    ~Here();
    Here(const Here&) = delete;
    Here& operator=(const Here&) = delete;

   private:
    const std::shared_ptr<Tally>* before_;
  };

 private:
  HostCount counting_;
  std::shared_ptr<Tally> tally_;  // shared with what was born
};

// An allocator gave out `bytes`, or took them back if negative. Never allocates, never waits.
void device_allocated(c10::Device device, int64_t bytes) noexcept;
// From now on device_allocated is called for every allocation on devices of that type.
void allocations_are_told(c10::DeviceType type);

}  // namespace tenure
