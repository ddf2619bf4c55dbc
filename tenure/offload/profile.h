// Profile: follows a forward call by call and writes down what was made of what, how long it took,
// and whether a second call gives the same bits. Holds no storage. One thread at a time, under the
// session's lock but for the calls themselves.
//
// Note [Proof]
// That an operator is pure by its schema does not mean that it gives the same bits twice: kernels
// add up in an order of their own. So each call that might be repeated is, at once, while its
// inputs are there, and the outputs are compared byte by byte. The device is waited for; it is one
// step. The time of the second call is what the planner reckons with.
//
// Note [A busy device]
// A device at rest waits for the host to launch what comes next, and a short operator would seem to
// take as long as that. In a step the host is ahead. So a call is timed behind work that keeps the
// device busy while the host launches it.
#pragma once

#include <tenure/core/storage_ref.h>
#include <tenure/offload/recipe.h>
#include <tenure/offload/recorder.h>
#include <tenure/offload/script.h>

#include <ATen/core/stack.h>
#include <c10/core/Event.h>

#include <chrono>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tenure::offload {

// Whether the two hold the same bytes. Waits for the device.
bool same_bytes(const c10::Storage& a, const c10::Storage& b);

// How long what is queued between the two calls takes, on the device or here.
class Stopwatch {
 public:
  explicit Stopwatch(const c10::Stream& stream);
  // Waits for the device.
  double seconds();

 private:
  c10::Stream stream_;
  std::optional<c10::Event> begin_;
  std::chrono::steady_clock::time_point since_;
};

class Profile {
 public:
  // One call: what is known of it before it runs.
  struct Before {
    uint32_t first_value = 0;  // values from here on were not among its inputs
    c10::SmallVector<uint32_t, 4> tensors;
    std::vector<uint32_t> inputs;
    torch::jit::Stack arguments;  // for the second call; empty: there is none
    c10::Stream stream = c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU));
  };
  // What a second call showed.
  struct Proof {
    double seconds = 0;
    uint64_t scratch = 0;
    bool same = false;
  };

  void begin();
  Before before(const Operator& op, const torch::jit::Stack& stack, size_t tick);
  // `proof`: none, if it was not repeated; then `seconds` are those of the call itself.
  void after(const Operator& op, Before before, const torch::jit::Stack& stack, size_t tick,
             NameId module, double seconds, const std::optional<Proof>& proof);
  // Gives the device something to do for a while. Not under the lock.
  static void keep_busy(const c10::Stream& stream);
  // Repeats a call: its outputs take the place of the arguments. How long it took. Neither this nor
  // same_outputs() under the lock: they run operators.
  static double repeat(const Operator& op, torch::jit::Stack& arguments, const c10::Stream& stream);
  static bool same_outputs(const Operator& op, const torch::jit::Stack& first,
                           const torch::jit::Stack& second);
  // Bytes of the storages that a call has made.
  static int64_t output_bytes(const Operator& op, const torch::jit::Stack& stack);

  // Someone is about to write to it, in the interval `tick`.
  void written(const at::Tensor& tensor, size_t tick);
  // Autograd saves it, as the `index`-th.
  void saved(const c10::Storage& storage, const Version& version, uint32_t index, size_t tick);
  // The tick `tick` has come: who is gone since the one before, and who was written to unseen?
  void notice(size_t tick);
  // By which steps of different calls are told apart that save as `saved` says.
  uint64_t shape(uint64_t saved) const;
  // What the step was, in `ticks` intervals.
  Script finish(size_t ticks);

 private:
  struct Alive {
    uint32_t value;
    StorageRef storage;
    Version version;  // when last looked at
  };
  uint32_t value_of(const c10::Storage& storage, const Version& version, size_t tick);

  Script script_;
  std::unordered_map<StorageRef, uint32_t> values_;
  std::vector<Alive> alive_;
  size_t noticed_ = 0;           // the last tick that came
  std::vector<size_t> written_;  // by value: when last
  std::vector<bool> released_;   // by value: someone has taken its data away for a while
};

}  // namespace tenure::offload
