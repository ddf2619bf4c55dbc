#include <tenure/offload/call_times.h>

#include <tenure/core/streams.h>
#include <tenure/offload/recipe.h>

namespace tenure::offload {

void CallTimes::begin(c10::Device device) {
  device_ = device;
  begin_.reset();
  made_.clear();
}

c10::Event CallTimes::mark() const {
  c10::Event out(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  out.record(current_stream(device_));
  return out;
}

void CallTimes::called(size_t index) {
  if (!begin_) {
    begin_ = mark();
  }
  index_ = index;
}

void CallTimes::made(const Operator& op, const torch::jit::Stack& stack) {
  const auto* output = op.returns > 0 ? output_at(stack, op, 0) : nullptr;
  const bool elsewhere = output == nullptr || output->device() != device_;
  made_.push_back({.index = index_, .end = mark(), .elsewhere = elsewhere});
}

std::vector<std::pair<size_t, double>> CallTimes::seconds() {
  std::vector<std::pair<size_t, double>> out;
  const auto* before = begin_ ? &*begin_ : nullptr;
  for (const auto& one : made_) {
    one.end.synchronize();
    if (!one.elsewhere) {
      out.emplace_back(one.index, before->elapsedTime(one.end) / 1e3);
    }
    before = &one.end;
  }
  begin(c10::Device(c10::DeviceType::CPU));
  return out;
}

}  // namespace tenure::offload
