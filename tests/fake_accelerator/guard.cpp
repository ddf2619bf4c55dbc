// The fake accelerator's streams, events and current device as c10 sees them: what c10::Event,
// c10::Stream, c10::StreamGuard, at::accelerator and autograd's engine call.

#include "allocators.h"
#include "current.h"
#include "lanes.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace fake_accelerator {

namespace {

using Clock = std::chrono::steady_clock;

// What c10 knows as a `void* event`. Recording again moves the mark: streams that already wait keep
// waiting for the old one, as c10 demands.
struct Event {
  Mark mark;
  std::shared_ptr<Clock::time_point>
      reached_at;  // shared with the queued item, which may outlive us
};

Event& event_at(void* event) { return *static_cast<Event*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDeviceCount; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return {kDeviceType, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kDeviceType, current_device()}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(device.index());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(actual(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return Lanes::get().create(actual(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return Lanes::get().pooled(actual(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    return Lanes::get().query(Lanes::get().here(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lanes::get().synchronize(Lanes::get().here(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Lanes::get().synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device,
              c10::EventFlag flag) const override {
    TORCH_CHECK(device < 0 || device == stream.device_index(), "an event of fake device ",
                int{device}, " cannot be recorded on ", stream);
    if (*event == nullptr) {
      *event = new Event;
    }
    Event& to = event_at(*event);
    if (flag != c10::EventFlag::BACKEND_DEFAULT) {
      to.mark = Lanes::get().record(stream);
      return;
    }
    to.reached_at = std::make_shared<Clock::time_point>();
    to.mark = Lanes::get().record(stream, [at = to.reached_at] { *at = Clock::now(); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      Lanes::get().wait(stream, event_at(event).mark);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Lanes::get().query(event_at(event).mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      Lanes::get().synchronize(event_at(event).mark);
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex /*device*/) const override {
    return std::chrono::duration<double, std::milli>(*event_at(to).reached_at -
                                                     *event_at(from).reached_at)
        .count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Memory::get().use_on(data.get(), stream);
  }

 private:
  static c10::DeviceIndex actual(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

// When the library is loaded, not by install(): autograd counts devices at the first backward of
// the process, and would have no thread for ours after an earlier one on the CPU. Leaked, as c10
// asks: guards run in static destructors.
const c10::impl::DeviceGuardImplRegistrar kRegistered(kDeviceType, new Guard);

}  // namespace

}  // namespace fake_accelerator
