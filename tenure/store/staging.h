// Staging: bytes between an accelerator and pageable memory, in pieces through two pinned buffers,
// so that the copy over the bus and the copy on the host go on at once. One thread at a time.
#pragma once

#include <tenure/core/fence.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tenure::store {

inline constexpr uint64_t kPieceBytes = 16 << 20;

// From a contiguous tensor. read() is asked for its bytes in order, kPieceBytes at most at once.
class FromDevice {
 public:
  explicit FromDevice(const at::Tensor& tensor);

  void read(uint64_t offset, std::span<std::byte> piece);

 private:
  struct Buffer {
    at::Tensor pinned;
    Fence arrived;
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };
  void ask(Buffer& buffer);

  at::Tensor source_;  // its bytes
  uint64_t asked_ = 0;
  std::array<Buffer, 2> buffers_;
  size_t turn_ = 0;
};

// Into a contiguous tensor on an accelerator, on its current stream; as with any copy there, work
// queued on that stream afterwards sees it. `bytes` may go as soon as this returns.
void copy_to_device(std::span<const std::byte> bytes, const at::Tensor& target);

}  // namespace tenure::store
