// The fake accelerator's ATen kernels: what makes tensors and views, what copies, and for all else
// the CPU's kernels. Registered with the dispatcher when the library is loaded.

#include "allocators.h"
#include "copy.h"
#include "current.h"
#include "lanes.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>

namespace fake_accelerator {

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_or_current(std::optional<c10::Device> device) {
  return {kDeviceType, device && device->has_index() ? device->index() : current_device()};
}

void check_strided(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "fake tensors are strided");
  TORCH_CHECK(!pin_memory.value_or(false), "only CPU tensors can be pinned");
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  check_strided(layout, pin_memory);
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, c10::GetAllocator(kDeviceType), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
                         std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_strided(layout, pin_memory);
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kDeviceType), kKeys,
                                           c10::dtype_or_default(dtype));
}

// Growing copies the old contents at once, which is compute.
const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  const Compute compute({self.device().index()});
  return at::native::resize_(self, size, format);
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(kDeviceType),
                       /*resizable=*/true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) {
    to.resize_(from.sizes());
  }
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  auto& lanes = Lanes::get();
  lanes.synchronize(lanes.here(current_stream(self.device().index())));
  return at::native::_local_scalar_dense_cpu(self);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Memory::get().use_on(self.storage().data(), stream);
}

// --- everything else -------------------------------------------------------------------------

template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const auto& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      if (tensor) {
        visit(*tensor);
      }
    }
  }
}

std::vector<c10::DeviceIndex> fake_devices(c10::ArrayRef<c10::IValue> arguments) {
  std::vector<c10::DeviceIndex> devices;
  const auto add = [&](c10::Device device) {
    if (device.type() != kDeviceType) {
      return;
    }
    const auto index = device_or_current(device).index();
    if (std::find(devices.begin(), devices.end(), index) == devices.end()) {
      devices.push_back(index);
    }
  };
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.defined()) {
        add(tensor.device());
      }
    });
    if (argument.isDevice()) {
      add(argument.toDevice());
    }
  }
  return devices;
}

// at::native::cpu_fallback puts results where the first tensor is, which may be a CPU scalar.
void move_results(const c10::FunctionSchema& schema, torch::jit::Stack* stack,
                  c10::DeviceIndex index) {
  const c10::Device device(kDeviceType, index);
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& result = torch::jit::peek(stack, i, schema.returns().size());
    if (result.isTensor() && result.toTensor().defined() && result.toTensor().is_cpu()) {
      result = result.toTensor().to(device);
    }
  }
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto devices = fake_devices(torch::jit::last(stack, schema.arguments().size()));
  const Compute compute(devices);
  // Views must be kernels of ours: a fallback would quietly return a copy.
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  if (!devices.empty()) {
    move_results(schema, stack, devices.front());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view",
         static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias",
         static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef, at::IntArrayRef)>(
             &at::native::_reshape_alias));
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage",
         static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
}

// The fallbacks of these keys would materialise the view first, by a copy that comes back here.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

}  // namespace fake_accelerator
