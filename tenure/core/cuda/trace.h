// For libtenure_cuda: the trace of the CUDA caching allocator.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <exception>
#include <string>

namespace tenure::cuda {

using TraceEntry = c10::CachingDeviceAllocator::TraceEntry;

// From now on `tracker` hears of every block that is given out or freed, on the thread that does it
// and under the allocator's lock: it may not allocate on a device, or wait. It cannot be taken off
// again. To be called after CUDA was initialised. Returns null, or why it cannot be.
inline const char* attach(void (*tracker)(const TraceEntry&)) {
  thread_local std::string why;
  try {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(tracker);
    return nullptr;
  } catch (const std::exception& error) {
    why = error.what();
    return why.c_str();
  }
}

}  // namespace tenure::cuda
