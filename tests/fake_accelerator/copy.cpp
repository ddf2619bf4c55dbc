#include "copy.h"

#include "allocators.h"
#include "current.h"
#include "lanes.h"

#include <ATen/ops/from_blob.h>

#include <cstring>

namespace fake_accelerator {

namespace {

thread_local int compute_depth = 0;

bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kDeviceType; }

// The same memory as a CPU tensor, for ATen's CPU kernels. Keeps nothing alive.
at::Tensor as_cpu(const at::Tensor& tensor, void* data) {
  auto alias =
      at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

void copy_now(const at::Tensor& from, const at::Tensor& to) {
  as_cpu(to, to.mutable_data_ptr()).copy_(as_cpu(from, const_cast<void*>(from.const_data_ptr())));
}

// Bytes of one tensor to another of the same shape and type. Plain data, because it runs on any
// thread and under a lock: no tensor, no dispatcher.
struct Transfer {
  char* to;
  const char* from;
  size_t run_bytes;  // contiguous in both: one element, or everything where the layouts agree
  std::vector<int64_t> sizes, to_strides, from_strides;  // strides in bytes

  Transfer(const at::Tensor& source, const at::Tensor& target)
      : to(static_cast<char*>(target.mutable_data_ptr())),
        from(static_cast<const char*>(source.const_data_ptr())),
        run_bytes(target.element_size()) {
    if (target.is_non_overlapping_and_dense() && source.strides() == target.strides()) {
      run_bytes = target.nbytes();
      return;
    }
    const auto item = static_cast<int64_t>(run_bytes);
    sizes = target.sizes().vec();
    for (const auto stride : target.strides()) {
      to_strides.push_back(stride * item);
    }
    for (const auto stride : source.strides()) {
      from_strides.push_back(stride * item);
    }
  }

  void run(size_t dimension, int64_t to_at, int64_t from_at) const {
    if (dimension == sizes.size()) {
      std::memmove(to + to_at, from + from_at, run_bytes);
      return;
    }
    for (int64_t i = 0; i < sizes[dimension]; ++i) {
      run(dimension + 1, to_at + i * to_strides[dimension], from_at + i * from_strides[dimension]);
    }
  }
  void operator()() const { run(0, 0, 0); }
};

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  Lanes::get().enqueue(current_stream(to.device().index()), Transfer(from, to));
}

// As CUDA does: on the source's stream, with each side's current stream waiting for the other.
void copy_across_devices(const at::Tensor& from, const at::Tensor& to) {
  auto& lanes = Lanes::get();
  const auto from_stream = current_stream(from.device().index());
  const auto to_stream = current_stream(to.device().index());
  lanes.wait(from_stream, lanes.record(to_stream));
  lanes.enqueue(from_stream, Transfer(from, to));
  lanes.wait(to_stream, lanes.record(from_stream));
}

void host_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& lanes = Lanes::get();
  const auto stream = current_stream(to.device().index());
  if (Memory::get().is_pinned(from.const_data_ptr())) {
    lanes.enqueue(stream, Transfer(from, to));
    Memory::get().use_on(from.storage().data(), stream);
  } else {
    // CUDA stages pageable memory, so the caller may write to it as soon as this returns. The
    // queued copy owns a CPU tensor: nothing of this library runs when it dies.
    const at::Tensor staged = from.clone();
    lanes.enqueue(stream, [staged, transfer = Transfer(staged, to)] { transfer(); });
  }
  if (!non_blocking) {
    lanes.synchronize(lanes.here(stream));
  }
}

void device_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& lanes = Lanes::get();
  const auto stream = current_stream(from.device().index());
  const bool pinned = Memory::get().is_pinned(to.const_data_ptr());
  lanes.enqueue(stream, Transfer(from, to));
  if (pinned) {
    Memory::get().use_on(to.storage().data(), stream);
  }
  if (!non_blocking || !pinned) {
    lanes.synchronize(lanes.here(stream));
  }
}

bool same_representation(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() &&
         a.is_neg() == b.is_neg();
}

// A change of type is compute on a device. To or from the host it is compute beside a copy, on the
// source's side, as in CUDA's copy.
void copy_converted(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (on_device(from) && from.device() == to.device()) {
    const Compute compute({to.device().index()});
    copy_now(from, to);
    return;
  }
  TORCH_CHECK(!to.is_conj() && !to.is_neg(),
              "the fake accelerator does not copy into conjugated or negated views across devices");
  copy_from(from.resolve_conj().resolve_neg().to(to.scalar_type()), to, non_blocking);
}

}  // namespace

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0 || from.is_same(to)) {
    return to;
  }
  const at::Tensor source = from.expand(to.sizes());
  if (compute_depth > 0) {
    copy_now(source, to);
  } else if (!same_representation(source, to)) {
    copy_converted(source, to, non_blocking);
  } else if (!on_device(source)) {
    host_to_device(source, to, non_blocking);
  } else if (!on_device(to)) {
    device_to_host(source, to, non_blocking);
  } else if (source.device() == to.device()) {
    copy_on_device(source, to);
  } else {
    copy_across_devices(source, to);
  }
  return to;
}

Compute::Compute(const std::vector<c10::DeviceIndex>& devices) {
  for (const auto device : devices) {
    Lanes::get().drain(current_stream(device));
  }
  ++compute_depth;
}

Compute::~Compute() { --compute_depth; }

}  // namespace fake_accelerator
