// The part of libtenure_cuda that tells meters of every allocation.
#include <tenure/core/meter.h>

#include <tenure/core/cuda/trace.h>

namespace {

using Entry = tenure::cuda::TraceEntry;

void track(const Entry& entry) {
  const c10::Device device(c10::DeviceType::CUDA, entry.device_);
  if (entry.action_ == Entry::ALLOC) {
    tenure::device_allocated(device, static_cast<int64_t>(entry.size_));
  } else if (entry.action_ == Entry::FREE_REQUESTED) {
    tenure::device_allocated(device, -static_cast<int64_t>(entry.size_));
  }
}

}  // namespace

// To be called once, after CUDA was initialised. Returns null, or why allocations cannot be told.
extern "C" __attribute__((visibility("default"))) const char* tenure_meter_cuda() {
  return tenure::cuda::attach(&track);
}
