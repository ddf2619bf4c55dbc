#include <tenure/core/meter.h>

#include <tenure/core/storage_ref.h>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <string>

namespace tenure {

// Relative: what was given out since some moment.
struct Meter::Level {
  std::atomic<int64_t> current = 0;
  std::atomic<int64_t> peak = 0;
  std::atomic<int> device = -1;  // by device_tag; -1: nobody's
};

namespace {

// So many meters of a process are traced at once; later ones sample.
constexpr size_t kSlots = 16;
std::atomic<int> g_in_use = 0;

std::array<std::atomic<bool>, 64> g_told;  // by device type

// Whether CUDA's allocator tells of its allocations: libtenure_cuda beside this library.
bool trace_cuda() {
  static const bool traced = [] {
    Dl_info here{};
    if (dladdr(reinterpret_cast<void*>(&device_allocated), &here) == 0) {
      return false;
    }
    std::string path = here.dli_fname;
    path.resize(path.rfind('/') + 1);
    path += "libtenure_cuda.so";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      return false;
    }
    auto* meter = reinterpret_cast<const char* (*)()>(dlsym(library, "tenure_meter_cuda"));
    return meter != nullptr && meter() == nullptr;
  }();
  return traced;
}

c10::CachingDeviceAllocator::DeviceStats stats_of(c10::Device device) {
  return c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
}

const c10::CachingAllocator::Stat& all_of(const c10::CachingAllocator::StatArray& stats) {
  return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

// What the allocator itself says. The CPU's has no peak of its own: our trace knows it.
Meter::Reading own_figures(c10::Device device) {
  if (device.is_cpu()) {
    return {.current = host_counted(), .peak = 0, .asked = host_counted()};
  }
  const auto stats = stats_of(device);
  const auto& allocated = all_of(stats.allocated_bytes);
  return {.current = allocated.current,
          .peak = allocated.peak,
          .asked = all_of(stats.requested_bytes).current};
}

// The levels of all meters, for ever: trackers cannot be taken off an allocator.
std::array<Meter::Level, kSlots>& levels() {
  static auto* all = new std::array<Meter::Level, kSlots>;
  return *all;
}

bool is_told(c10::DeviceType type) {
  return g_told[static_cast<size_t>(type)] || (type == c10::DeviceType::CUDA && trace_cuda());
}

// "cuda" is the one that is current.
c10::Device with_index(c10::Device device) {
  return device.is_cpu() || device.has_index()
             ? device
             : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  auto seen = peak.load(std::memory_order_relaxed);
  while (seen < value && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

Meter::Meter(c10::Device device) : device_(with_index(device)) {
  if (device.is_cpu() && !is_told(device.type())) {
    return;
  }
  precision_ = Precision::sampled;
  last_own_peak_ = own_figures(device_).peak;
  if (is_told(device.type())) {
    for (auto& level : levels()) {
      int free = -1;
      if (level.device.compare_exchange_strong(free, device_tag(device_))) {
        level_ = &level;
        g_in_use.fetch_add(1);
        precision_ = Precision::traced;
        break;
      }
    }
  }
  read();
}

Meter::~Meter() {
  if (level_ != nullptr) {
    g_in_use.fetch_sub(1);
    level_->device.store(-1);
  }
}

Meter::Reading Meter::read() {
  if (precision_ == Precision::none) {
    return {};
  }
  const auto own = own_figures(device_);
  Reading now{
      .current = own.current, .peak = std::max(own.current, last_.current), .asked = own.asked};
  if (level_ != nullptr) {
    const auto current = level_->current.load(std::memory_order_relaxed);
    const auto peak = level_->peak.exchange(current, std::memory_order_relaxed);
    now.peak = std::max(now.peak, own.current + peak - current);
  }
  if (own.peak > last_own_peak_) {
    now.peak = std::max(now.peak, own.peak);
  }
  last_own_peak_ = own.peak;
  last_ = now;
  return now;
}

void allocations_are_told(c10::DeviceType type) { g_told[static_cast<size_t>(type)] = true; }

void device_allocated(c10::Device device, int64_t bytes) noexcept {
  if (g_in_use.load(std::memory_order_relaxed) == 0) {
    return;
  }
  const int tag = device_tag(device);
  for (auto& level : levels()) {
    if (level.device.load(std::memory_order_relaxed) == tag) {
      raise_to(level.peak, level.current.fetch_add(bytes, std::memory_order_relaxed) + bytes);
    }
  }
}

}  // namespace tenure

// For a device whose allocator is not linked with this library: the address of this is handed over.
extern "C" __attribute__((visibility("default"))) void tenure_privateuse1_allocated(
    c10::DeviceIndex index, int64_t bytes) {
  const auto type = c10::DeviceType::PrivateUse1;
  tenure::allocations_are_told(type);
  tenure::device_allocated(c10::Device(type, index), bytes);
}
