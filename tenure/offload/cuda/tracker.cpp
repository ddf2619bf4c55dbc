// The part of libtenure_cuda that tells offload's meters of every allocation. As inspect's tracker:
// called under the allocator's lock, so nothing here may allocate on a device or wait.
#include <tenure/offload/meter.h>

#include <c10/cuda/CUDACachingAllocator.h>

#include <exception>
#include <string>

namespace {

using Entry = c10::CachingDeviceAllocator::TraceEntry;

void track(const Entry& entry) {
  const c10::Device device(c10::DeviceType::CUDA, entry.device_);
  if (entry.action_ == Entry::ALLOC) {
    tenure::offload::device_allocated(device, static_cast<int64_t>(entry.size_));
  } else if (entry.action_ == Entry::FREE_REQUESTED) {
    tenure::offload::device_allocated(device, -static_cast<int64_t>(entry.size_));
  }
}

}  // namespace

// To be called once, after CUDA was initialised. Returns null, or why allocations cannot be told.
extern "C" __attribute__((visibility("default"))) const char* tenure_meter_cuda() {
  static std::string why;
  try {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&track);
    return nullptr;
  } catch (const std::exception& error) {
    why = error.what();
    return why.c_str();
  }
}
