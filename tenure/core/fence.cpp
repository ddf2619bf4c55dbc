#include <tenure/core/fence.h>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tenure {
namespace {

class DevicePoint final : public Fence::Point {
 public:
  explicit DevicePoint(const c10::Stream& stream) : event_(stream.device_type()) {
    event_.record(stream);
  }
  bool ready() const override { return event_.query(); }
  void wait_on_host() const override { event_.synchronize(); }
  void wait_on(const c10::Stream& stream) const override { event_.block(stream); }

 private:
  c10::Event event_;
};

}  // namespace

Fence Fence::record(const c10::Stream& stream) {
  if (stream.device_type() == c10::DeviceType::CPU) {
    return {};
  }
  return Fence(std::make_shared<const DevicePoint>(stream));
}

Fence Fence::record(c10::Device device) {
  if (device.is_cpu()) {
    return {};
  }
  return record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

}  // namespace tenure
