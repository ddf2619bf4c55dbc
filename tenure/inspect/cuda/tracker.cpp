// libtenure_cuda: births and deaths from the CUDA caching allocator's trace. A library of its own,
// for it needs CUDA's headers to build and is loaded only where a program uses CUDA.
//
// The allocator calls its trackers on the thread that allocates or frees, under its own lock, so
// nothing here may allocate on a device or wait. Trackers cannot be taken off again: when nothing
// is watched this one costs a load and a branch, and a look-up for what is freed as long as
// something lives that was born under watch.
#include <tenure/core/storage_ref.h>
#include <tenure/inspect/observer.h>

#include <c10/cuda/CUDACachingAllocator.h>

#include <exception>
#include <string>

namespace {

using Entry = c10::CachingDeviceAllocator::TraceEntry;

void track(const Entry& entry) {
  const auto* data =
      reinterpret_cast<const void*>(entry.addr_);  // NOLINT(performance-no-int-to-ptr)
  if (entry.action_ == Entry::ALLOC) {
    const c10::Device device(c10::DeviceType::CUDA, entry.device_);
    tenure::inspect::observer().device_born(data, entry.size_, tenure::device_tag(device));
  } else if (entry.action_ == Entry::FREE_REQUESTED) {
    tenure::inspect::observer().device_died(data, entry.size_);
  }
}

}  // namespace

// To be called once, after CUDA was initialised. Returns null, or why devices cannot be watched.
extern "C" __attribute__((visibility("default"))) const char* tenure_watch_cuda() {
  static std::string why;
  try {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&track);
    return nullptr;
  } catch (const std::exception& error) {
    why = error.what();
    return why.c_str();
  }
}
