#include "current.h"

#include "lanes.h"

#include <array>
#include <utility>

namespace fake_accelerator {

namespace {

struct Current {
  c10::DeviceIndex device = 0;
  std::array<c10::StreamId, kDeviceCount> streams{};
};
thread_local Current current;

c10::DeviceIndex existing(c10::DeviceIndex device) {
  if (device < 0) {
    return current.device;
  }
  check_device(device);
  return device;
}

}  // namespace

c10::DeviceIndex current_device() { return current.device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  return std::exchange(current.device, existing(device));
}

c10::Stream current_stream(c10::DeviceIndex device) {
  const auto index = existing(device);
  return stream_of(index, current.streams[index]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto index = existing(stream.device_index());
  return stream_of(index, std::exchange(current.streams[index], stream.id()));
}

}  // namespace fake_accelerator
