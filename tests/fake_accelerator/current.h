// Which device and which stream of each device the calling thread uses: device 0 and the default
// streams until it says otherwise, as on CUDA.
#pragma once

#include "fake_accelerator.h"

namespace fake_accelerator {

c10::DeviceIndex current_device();
// Returns the previous one. A negative index means "leave it", as c10 uses it.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

// A negative device means the current one.
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);

}  // namespace fake_accelerator
