// Samples: what the operating system and the device allocators say of this process's memory, in
// bytes. The one source of these figures for inspect, telemetry and the user.
//
// Sampler::sample() costs some microseconds and may be called from any thread: it never takes the
// GIL, never waits for another thread of Tenure's (a device allocator's own lock it does take), and
// never creates a device context or wakes a runtime that the program has not initialised. Figures
// that cost milliseconds are refreshed by a thread that runs only while a Refresh lives. After a
// fork the child samples itself and has no thread until it asks for one.
//
// A figure that this machine does not give is absent, never zero.
#pragma once

#include <tenure/core/cgroup.h>

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace tenure {

// From a walk over every mapping of the process (5 to 16 ms), as the sampler's thread last took it.
struct MappedSample {
  int64_t pss = 0;  // pages shared with n processes count 1/n
  // The part of pss that is files, libtorch among them: it falls when another process that maps
  // them starts. pss - pss_file moves only with this process and those it shares memory with.
  std::optional<int64_t> pss_file;
  int64_t rss =
      0;  // exact; ProcessSample::rss may lag by some pages for each CPU before Linux 6.16
  std::optional<int64_t> cgroup_inactive_file;  // MemoryCgroup::inactive_file
  // MemoryCgroup::shared less what this process maps of it: files in /dev/shm, say.
  std::optional<int64_t> cgroup_files_in_memory;
  std::chrono::nanoseconds age{0};  // since the walk began
};

struct ProcessSample {
  int64_t rss = 0;
  int64_t virtual_size = 0;
  std::optional<int64_t> virtual_limit;  // ulimit -v
  std::optional<int64_t> data;           // private and writable, resident or not
  std::optional<int64_t> data_limit;     // ulimit -d
  std::optional<int64_t> peak_rss;       // since exec
  std::optional<int64_t> shared;         // resident pages of shared memory: memfd, /dev/shm, tmpfs
  std::optional<int64_t> files;  // resident pages of files, which the kernel may drop at any time
  std::optional<int64_t> swap;
  std::optional<int64_t> host_total;
  std::optional<int64_t> host_available;
  std::optional<CgroupSample> cgroup;
  std::optional<MappedSample> mapped;  // absent until a Refresh has lived long enough for one walk
};

struct Gauge {
  int64_t current = 0;
  int64_t peak = 0;  // since the allocator's statistics were last reset, by whomever
};

struct AllocatorSample {
  Gauge allocated;     // in tensors
  Gauge active;        // allocated, or freed but still in use by a stream
  Gauge inactive;      // the free remainder of split blocks: cannot go back to the driver
  Gauge reserved;      // taken from the driver
  int64_t blocks = 0;  // allocated
  int64_t retries = 0;
  int64_t ooms = 0;
};

struct DriverSample {
  int64_t free = 0;
  int64_t total = 0;
};

// An accelerator device on which this process has a context.
struct DeviceSample {
  c10::Device device;
  std::optional<AllocatorSample> allocator;
  std::optional<DriverSample> driver;
};

// Page-locked host memory of the accelerator's host allocator.
struct PinnedSample {
  int64_t active = 0;  // in tensors, or freed but still in use by a stream
  Gauge reserved;      // taken from the system, cached blocks included
};

struct Sample {
  ProcessSample process;
  std::optional<PinnedSample> pinned;
  std::vector<DeviceSample> devices;
};

// The devices alone. None while the program has not initialised the accelerator, and none in a
// child forked after it has, where the runtime cannot be used.
std::vector<DeviceSample> sample_devices();
// The same without what the driver says, which takes longer than all the rest.
std::vector<DeviceSample> sample_allocators();
// REQUIRES: sample_devices() has a device of this type.
std::optional<PinnedSample> sample_pinned(c10::DeviceType type);

class Sampler {
 public:
  class Refresh;

  Sampler();
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  // The one that parts share, so that one process has one thread. Never destroyed; its thread ends
  // before the process's static destructors run.
  static Sampler& shared();

  [[nodiscard]] Sample sample() const;

  // ProcessSample::mapped is at most about `period` old while the Refresh lives, or 1000 times as
  // old as the CPU time that a walk takes: walks have 0.1 % of a core, but there is one every 5
  // minutes at least. Its cgroup figures, which are not walked for, keep to the same and to 30
  // seconds. Several may live at once: the shortest period counts. Throws InputError for a period
  // that is not between 1 ms and a day, Error when the thread cannot be started.
  [[nodiscard]] Refresh refresh(std::chrono::duration<double> period = std::chrono::seconds(1));

  // Closes the files that sampling keeps open; the next sample opens them again. Waits for samples
  // that are under way, a tenth of a second at most, and does nothing while a Refresh lives.
  void rest();

 private:
  struct State;
  State& state() const;

  mutable std::atomic<uint32_t> users_{0};  // counted before the state is read
  // Replaced in a forked child, which neither stops nor frees what the parent's thread used. None
  // after rest().
  mutable std::atomic<State*> state_;
  std::mutex resting_;
};

// Move-only. Ends the thread with the last one, waiting for a walk that is under way.
// REQUIRES: the Sampler outlives it.
class Sampler::Refresh {
 public:
  Refresh() = default;
  Refresh(Refresh&& other) noexcept;
  Refresh& operator=(Refresh&& other) noexcept;
  Refresh(const Refresh&) = delete;
  Refresh& operator=(const Refresh&) = delete;
  ~Refresh();

 private:
  friend class Sampler;
  Refresh(State& state, uint64_t id);

  State* state_ = nullptr;
  uint64_t id_ = 0;
};

}  // namespace tenure
