// CallTimes: how long each call of a forward takes on the device, where it stands. One thread at a
// time.
//
// Note [Timed in its place]
// A call that is timed by itself (Note [A busy device] in profile.h) finds nothing in the device's
// cache of what the calls before it made, and a step takes less than the sum of its calls: on an
// H200 two thirds of it. A planner that takes forward for longer than it is takes the bus for
// faster than it is, and a call for dearer. So in the first step that follows a plan an event is
// left behind each call, which nobody waits for, and the plan is made again with the time between
// them. A wait for a copy may be in between: the lesser of the two times counts.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/Event.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace tenure::offload {

struct Operator;

class CallTimes {
 public:
  // A forward begins on that device. On the CPU, where a call takes what it takes, nothing is
  // timed.
  void begin(c10::Device device);
  bool runs() const { return !device_.is_cpu(); }
  // The call `index` comes, and has left its outputs on the stack.
  void called(size_t index);
  void made(const Operator& op, const torch::jit::Stack& stack);

  // What each of those calls took; none of those that were elsewhere. Waits for the device.
  std::vector<std::pair<size_t, double>> seconds();

 private:
  struct Made {
    size_t index = 0;
    c10::Event end;
    bool elsewhere = false;
  };

  c10::Event mark() const;

  c10::Device device_ = c10::Device(c10::DeviceType::CPU);
  std::optional<c10::Event> begin_;
  size_t index_ = 0;
  std::vector<Made> made_;
};

}  // namespace tenure::offload
