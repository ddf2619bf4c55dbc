// The stream that computes, and memory that another one uses.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tenure {

// The allocator must not give the memory away before what `stream` does with it is done.
inline void used_on(const c10::Storage& storage, const c10::Stream& stream) {
  c10::getDeviceAllocator(stream.device_type())->recordStream(storage.data_ptr(), stream);
}

inline c10::Stream current_stream(c10::Device device) {
  return device.is_cpu() ? c10::Stream(c10::Stream::DEFAULT, device)
                         : c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace tenure
