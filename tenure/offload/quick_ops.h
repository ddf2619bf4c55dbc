// Quick operators: kernels for interpose.h that let a call through without packing its arguments
// into boxes, which costs more than anything else there. For operators that make up most of a step.
#pragma once

#include <tenure/offload/interpose.h>

#include <ATen/core/boxing/KernelFunction.h>

#include <optional>

namespace tenure::offload {

// None: the operator is not one of them.
std::optional<c10::KernelFunction> quick_kernel(const c10::OperatorHandle& op);

}  // namespace tenure::offload
