// The fake accelerator's memory as torch sees it: a c10::DeviceAllocator and an at::HostAllocator
// over one Pool a device and one for pinned memory.
#pragma once

#include "pool.h"

#include <ATen/core/CachingHostAllocator.h>

namespace fake_accelerator {

// All pools and the policy, behind one lock. Lock order: Memory, then Lanes.
class Memory {
 public:
  static Memory& get();

  c10::DataPtr allocate_device(size_t bytes);
  c10::DataPtr allocate_pinned(size_t bytes);

  void use_on(const void* data, c10::Stream stream);
  bool is_pinned(const void* address);
  std::optional<c10::DeviceIndex> device_of(const void* address);

  void trim_devices();
  void trim_pinned();
  Pool::Stats device_stats(c10::DeviceIndex device);
  Pool::Stats pinned_stats();
  void reset_device_stats(c10::DeviceIndex device, void (c10::CachingAllocator::Stat::*reset)());
  void reset_pinned_stats(void (c10::CachingAllocator::Stat::*reset)());

  void set_policy(MemoryPolicy policy);
  MemoryPolicy policy();

 private:
  Memory() = default;
  static void free_device(void* data);
  static void free_pinned(void* data);
  Pool& device_pool(c10::DeviceIndex device);

  friend class DeviceAllocator;
  friend class PinnedAllocator;

  std::mutex mutex_;
  MemoryPolicy policy_;
  std::array<Pool, kDeviceCount> devices_{Pool(policy_), Pool(policy_)};
  Pool pinned_{policy_};
};

void register_allocators();

}  // namespace fake_accelerator
