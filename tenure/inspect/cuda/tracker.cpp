// libtenure_cuda: births and deaths from the CUDA caching allocator's trace. A library of its own,
// for it needs CUDA's headers to build and is loaded only where a program uses CUDA.
//
// When nothing is watched the tracker costs a load and a branch, and a look-up for what is freed as
// long as something lives that was born under watch.
#include <tenure/core/cuda/trace.h>
#include <tenure/core/storage_ref.h>
#include <tenure/inspect/observer.h>

namespace {

using Entry = tenure::cuda::TraceEntry;

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
  return tenure::cuda::attach(&track);
}
