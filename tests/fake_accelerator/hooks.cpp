#include "hooks.h"

#include "allocators.h"
#include "current.h"
#include "lanes.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>

namespace fake_accelerator {

namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDeviceCount; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }

  bool isPinnedPtr(const void* data) const override { return Memory::get().is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return at::getHostAllocator(kDeviceType);
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    const auto device = Memory::get().device_of(data);
    TORCH_CHECK(device.has_value(), data, " is not memory of a fake device");
    return {kDeviceType, *device};
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex /*device*/) const override {
    return at::detail::createCPUGenerator();
  }

  // untyped_storage().resize_(n)
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    TORCH_CHECK(storage.resizable(), "this storage cannot be resized");
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr fresh = storage.allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) {
      Lanes::get().drain(current_stream(storage.device().index()));
      std::memcpy(fresh.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);  // leaked: ATen keeps the pointer
}

}  // namespace fake_accelerator
