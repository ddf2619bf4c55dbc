#include <tenure/offload/profile.h>

#include <tenure/core/release.h>
#include <tenure/core/streams.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace tenure::offload {
namespace {

using Clock = std::chrono::steady_clock;

// About 0.1 ms of writing, where the host takes a few hundredths to launch it and a call.
constexpr int64_t kBusyBytes = int64_t{64} << 20;
constexpr int kBusyTimes = 8;

// The storage as a flat tensor of words, or bytes where they do not come out even.
at::Tensor flat(const c10::Storage& storage) {
  const bool even = storage.nbytes() % sizeof(int64_t) == 0;
  const auto dtype = even ? c10::ScalarType::Long : c10::ScalarType::Byte;
  const auto count = static_cast<int64_t>(storage.nbytes() / c10::elementSize(dtype));
  return tensor_on(storage, {.sizes = {count}, .strides = {1}, .offset = 0, .dtype = dtype});
}

c10::Stream stream_of(const std::vector<c10::Device>& devices) {
  for (const auto device : devices) {
    if (!device.is_cpu()) {
      return current_stream(device);
    }
  }
  return current_stream(c10::Device(c10::DeviceType::CPU));
}

}  // namespace

bool same_bytes(const c10::Storage& a, const c10::Storage& b) {
  if (a.nbytes() != b.nbytes() || a.device() != b.device()) {
    return false;
  }
  if (a.device().is_cpu()) {
    return std::memcmp(a.data(), b.data(), a.nbytes()) == 0;
  }
  const Plainly plainly;
  return at::equal(flat(a), flat(b));
}

Stopwatch::Stopwatch(const c10::Stream& stream) : stream_(stream), since_(Clock::now()) {
  if (!stream.device().is_cpu()) {
    begin_.emplace(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);
    begin_->record(stream);
  }
}

double Stopwatch::seconds() {
  if (!begin_) {
    return std::chrono::duration<double>(Clock::now() - since_).count();
  }
  c10::Event end(stream_.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  end.record(stream_);
  end.synchronize();
  return begin_->elapsedTime(end) / 1e3;
}

void Profile::begin() { *this = {}; }

uint32_t Profile::value_of(const c10::Storage& storage, const Version& version, size_t tick) {
  const StorageRef ref(storage);
  const auto next = static_cast<uint32_t>(script_.trace.values.size());
  const auto [known, fresh] = values_.try_emplace(ref, next);
  if (fresh) {
    script_.trace.values.push_back({.bytes = storage.nbytes(), .born = tick});
    written_.push_back(kNever);
    released_.push_back(false);
    alive_.push_back({.value = next, .storage = ref, .version = version});
  }
  return known->second;
}

Profile::Before Profile::before(const Operator& op, const torch::jit::Stack& stack, size_t tick) {
  Before out;
  std::vector<c10::Device> devices;
  c10::SmallVector<at::Tensor, 4> tensors;
  const bool told = each_tensor(op, stack, [&](const Argument& argument) {
    tensors.push_back(argument.tensor);
    return true;
  });
  if (told) {
    for (const auto& tensor : tensors) {
      if (is_number(tensor)) {
        out.tensors.push_back(kNone);
        continue;
      }
      devices.push_back(tensor.device());
      const auto value = value_of(tensor.storage(), Version(tensor), tick);
      out.tensors.push_back(value);
      if (std::ranges::find(out.inputs, value) == out.inputs.end()) {
        out.inputs.push_back(value);
      }
    }
  }
  out.stream = stream_of(devices);
  if (told && op.pure && !out.inputs.empty()) {
    out.arguments.assign(stack.end() - op.arguments, stack.end());
  }
  out.first_value = static_cast<uint32_t>(script_.trace.values.size());
  return out;
}

void Profile::after(const Operator& op, Before before, const torch::jit::Stack& stack, size_t tick,
                    NameId module, double seconds, const std::optional<Proof>& proof) {
  Scripted scripted{
      .op = &op, .module = module, .bytes = 0, .tensors = std::move(before.tensors), .makes = {}};
  CallTrace trace{.op = op.name,
                  .module = module,
                  .inputs = std::move(before.inputs),
                  .outputs = {},
                  .seconds = proof ? proof->seconds : seconds,
                  .scratch = proof ? proof->scratch : 0,
                  .repeatable = proof && proof->same};
  const auto index = static_cast<uint32_t>(script_.calls.size());
  for (uint32_t i = 0; i < op.returns; ++i) {
    const auto* output = output_at(stack, op, i);
    if (output == nullptr) {
      continue;
    }
    if (scripted.bytes == 0) {
      scripted.bytes = output->storage().nbytes();
    }
    // Autograd may have saved it before the call was over, as a value of nobody's.
    const auto value = value_of(output->storage(), Version(*output), tick);
    auto& made = script_.trace.values[value];
    if (value < before.first_value || made.call != kNone) {
      continue;
    }
    made.call = index;
    trace.outputs.push_back(value);
    scripted.makes.emplace_back(i, value);
  }
  script_.calls.push_back(std::move(scripted));
  script_.trace.calls.push_back(std::move(trace));
}

void Profile::keep_busy(const c10::Stream& stream) {
  if (stream.device().is_cpu()) {
    return;
  }
  const Plainly plainly;
  const c10::AutoGradMode no_grad(false);
  try {
    const auto options = at::TensorOptions().dtype(at::kByte).device(stream.device());
    const auto room = at::empty({kBusyBytes}, options);
    for (int i = 0; i < kBusyTimes; ++i) {
      room.zero_();
    }
  } catch (const c10::OutOfMemoryError&) {  // NOLINT(bugprone-empty-catch): it is timed at rest
  }
}

double Profile::repeat(const Operator& op, torch::jit::Stack& arguments,
                       const c10::Stream& stream) {
  const Plainly plainly;
  const c10::AutoGradMode no_grad(false);
  Stopwatch watch(stream);
  op.handle.callBoxed(&arguments);
  return watch.seconds();
}

bool Profile::same_outputs(const Operator& op, const torch::jit::Stack& first,
                           const torch::jit::Stack& second) {
  for (uint32_t i = 0; i < op.returns; ++i) {
    const auto* a = output_at(first, op, i);
    const auto* b = output_at(second, op, i);
    if (a == nullptr && b == nullptr) {
      continue;
    }
    if (a == nullptr || b == nullptr || geometry_of(*a) != geometry_of(*b) || a->is_alias_of(*b) ||
        !same_bytes(a->storage(), b->storage())) {
      return false;
    }
  }
  return true;
}

int64_t Profile::output_bytes(const Operator& op, const torch::jit::Stack& stack) {
  int64_t out = 0;
  for (uint32_t i = 0; i < op.returns; ++i) {
    const auto* output = output_at(stack, op, i);
    out += output == nullptr ? 0 : static_cast<int64_t>(output->storage().nbytes());
  }
  return out;
}

void Profile::written(const at::Tensor& tensor, size_t tick) {
  written_[value_of(tensor.storage(), Version(tensor), tick)] = tick;
}

void Profile::saved(const c10::Storage& storage, const Version& version, uint32_t index,
                    size_t tick) {
  // Autograd has let go of what it saved of it before, or it would not be saved anew: whoever held
  // that for others to be made of would have autograd find it, and count one save less.
  script_.trace.values[value_of(storage, version, tick)].saved = index;
}

void Profile::notice(size_t tick) {
  std::erase_if(alive_, [&](Alive& known) {
    const auto storage = known.storage.lock();
    if (!storage) {
      script_.trace.values[known.value].gone = tick;
      return true;
    }
    if (is_released(*storage)) {
      released_[known.value] = true;
    }
    // Kernels of compilers tell the counter, and nobody else.
    if (!known.version.is_current()) {
      written_[known.value] = noticed_;
      known.version.look_again();
    }
    return false;
  });
  noticed_ = tick;
}

uint64_t Profile::shape(uint64_t saved) const {
  for (const auto& call : script_.calls) {
    saved = c10::hash_combine(saved, reinterpret_cast<uintptr_t>(call.op));
  }
  return saved;
}

Script Profile::finish(size_t ticks) {
  notice(ticks);
  auto& values = script_.trace.values;
  for (size_t i = 0; i < values.size(); ++i) {
    // What is written after the last need of the step, as parameters are, was steady in it.
    // What comes and goes in it, as sharded weights do, may be half there when it is asked for.
    values[i].steady = (written_[i] == kNever || written_[i] + 1 >= ticks) && !released_[i];
  }
  auto out = std::move(script_);
  begin();
  return out;
}

}  // namespace tenure::offload
