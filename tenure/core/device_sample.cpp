#include <tenure/core/sample.h>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

namespace tenure {
namespace {

using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

// Note [A sample initialises nothing]
// Counting CUDA's devices or asking whether one has a context calls cuInit, after which a forked
// child can no longer use CUDA. The allocator knows without asking the driver whether the program
// has initialised the runtime, so that is asked first, and nothing else when it has not.
c10::DeviceAllocator* initialised_allocator(c10::DeviceType type) {
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(type));
  return allocator != nullptr && allocator->initialized() ? allocator : nullptr;
}

// What `ask` returns, or nullopt where this backend does not say: several throw for a figure that
// they do not have, and CUDA throws for all in a child forked after its initialisation.
template <class Ask>
auto unless_it_throws(Ask ask) -> std::optional<decltype(ask())> {
  try {
    return ask();
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

Gauge gauge(const c10::CachingAllocator::Stat& stat) { return {stat.current, stat.peak}; }

Gauge gauge(const StatArray& stats) {
  return gauge(stats[static_cast<size_t>(StatType::AGGREGATE)]);
}

AllocatorSample allocator_sample(c10::DeviceAllocator& allocator, c10::DeviceIndex index) {
  const auto stats = allocator.getDeviceStats(index);
  return {.allocated = gauge(stats.allocated_bytes),
          .active = gauge(stats.active_bytes),
          .inactive = gauge(stats.inactive_split_bytes),
          .reserved = gauge(stats.reserved_bytes),
          .blocks = gauge(stats.allocation).current,
          .retries = stats.num_alloc_retries,
          .ooms = stats.num_ooms};
}

DriverSample driver_sample(c10::DeviceAllocator& allocator, c10::DeviceIndex index) {
  const auto [free, total] = allocator.getMemoryInfo(index);
  return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

// Calls `sample` for each device on which the process has a context.
template <class Sample>
std::vector<DeviceSample> each_device(Sample sample) {
  std::vector<DeviceSample> out;
  const auto type = at::accelerator::getAccelerator();
  if (!type) {
    return out;
  }
  auto* allocator = initialised_allocator(*type);
  if (allocator == nullptr) {
    return out;
  }
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
  const auto count = at::accelerator::deviceCount();
  for (c10::DeviceIndex index = 0; index < count; ++index) {
    const auto has_context = unless_it_throws([&] { return hooks.hasPrimaryContext(index); });
    if (!has_context.value_or(false)) {
      continue;
    }
    out.push_back(sample(c10::Device(*type, index), *allocator));
  }
  return out;
}

DeviceSample without_driver(c10::Device device, c10::DeviceAllocator& allocator) {
  return {device, unless_it_throws([&] { return allocator_sample(allocator, device.index()); }),
          std::nullopt};
}

}  // namespace

std::vector<DeviceSample> sample_devices() {
  return each_device([](c10::Device device, c10::DeviceAllocator& allocator) {
    auto out = without_driver(device, allocator);
    out.driver = unless_it_throws([&] { return driver_sample(allocator, device.index()); });
    return out;
  });
}

std::vector<DeviceSample> sample_allocators() { return each_device(without_driver); }

std::optional<PinnedSample> sample_pinned(c10::DeviceType type) {
  return unless_it_throws([&]() -> PinnedSample {
    const auto stats = at::getHostAllocator(type)->get_stats();
    return {stats.active_bytes.current, gauge(stats.allocated_bytes)};
  });
}

}  // namespace tenure
