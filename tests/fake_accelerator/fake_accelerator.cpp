#include "fake_accelerator.h"

#include "allocators.h"
#include "current.h"
#include "hooks.h"
#include "lanes.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <cstring>

namespace fake_accelerator {

void install() {
  static const bool installed = [] {
    register_allocators();
    register_hooks();
    c10::register_privateuse1_backend("fake");
    return true;
  }();
  (void)installed;
}

void reset() {
  Lanes::get().reset();
  Memory::get().set_policy({});
  for (c10::DeviceIndex device = 0; device < kDeviceCount; ++device) {
    Memory::get().reset_device_stats(device, &c10::CachingAllocator::Stat::reset_peak);
  }
  Memory::get().reset_pinned_stats(&c10::CachingAllocator::Stat::reset_peak);
}

c10::Stream new_stream(c10::DeviceIndex device) { return Lanes::get().create(device); }
void hold(c10::Stream stream) { Lanes::get().hold(stream); }
void release(c10::Stream stream) { Lanes::get().release(stream); }
size_t advance(c10::Stream stream, size_t items) { return Lanes::get().advance(stream, items); }
bool held(c10::Stream stream) { return Lanes::get().held(stream); }
size_t pending(c10::Stream stream) { return Lanes::get().pending(stream); }
void shuffle(uint64_t seed) { Lanes::get().shuffle(seed); }
void run_in_order() { Lanes::get().run_in_order(); }
Waits waits() { return Lanes::get().waits(); }

void enqueue(c10::Stream stream, std::function<void()> work) {
  Lanes::get().enqueue(stream, std::move(work));
}

void launch_memset(const at::Tensor& tensor, unsigned char byte) {
  TORCH_CHECK(tensor.device().type() == kDeviceType,
              "launch_memset needs a fake tensor, not one on ", tensor.device());
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(),
              "launch_memset needs a tensor dense in memory");
  const auto stream = current_stream(tensor.device().index());
  Lanes::get().enqueue(stream, [data = tensor.mutable_data_ptr(), bytes = tensor.nbytes(), byte] {
    std::memset(data, byte, bytes);
  });
}

void set_memory_policy(MemoryPolicy policy) { Memory::get().set_policy(policy); }
MemoryPolicy memory_policy() { return Memory::get().policy(); }

}  // namespace fake_accelerator
