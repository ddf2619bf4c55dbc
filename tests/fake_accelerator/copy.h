// Copies to, from and between fake devices, queued as CUDA queues them (fake_accelerator.h says
// which make the host wait), and the switch by which compute copies at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fake_accelerator {

// aten::_copy_from: `to` takes the values of `from`, broadcast to its shape. Returns `to`.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

// While alive on this thread, compute runs: the given devices' current streams have been drained,
// and copies happen at once.
class Compute {
 public:
  explicit Compute(const std::vector<c10::DeviceIndex>& devices);
  ~Compute();
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;
};

}  // namespace fake_accelerator
