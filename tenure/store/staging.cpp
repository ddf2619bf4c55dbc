#include <tenure/store/staging.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

namespace tenure::store {

namespace {

at::Tensor pinned_bytes(uint64_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)},
                   at::TensorOptions().dtype(at::kByte).pinned_memory(true));
}

at::Tensor as_bytes(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(tensor.device());
  if (tensor.nbytes() == 0) {
    return at::empty({0}, options);  // there is no pointer whose device from_blob could check
  }
  return at::from_blob(tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())}, options);
}

at::Tensor stretch(const at::Tensor& bytes, uint64_t offset, uint64_t length) {
  return bytes.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(length));
}

}  // namespace

FromDevice::FromDevice(const at::Tensor& tensor) : source_(as_bytes(tensor)) {
  for (auto& buffer : buffers_) {
    ask(buffer);
  }
}

void FromDevice::ask(Buffer& buffer) {
  const auto left = source_.nbytes() - asked_;
  buffer.offset = asked_;
  buffer.bytes = std::min<uint64_t>(kPieceBytes, left);
  if (buffer.bytes == 0) {
    return;
  }
  if (!buffer.pinned.defined()) {
    buffer.pinned = pinned_bytes(buffer.bytes);
  }
  stretch(buffer.pinned, 0, buffer.bytes)
      .copy_(stretch(source_, asked_, buffer.bytes), /*non_blocking=*/true);
  buffer.arrived = Fence::record(source_.device());
  asked_ += buffer.bytes;
}

void FromDevice::read(uint64_t offset, std::span<std::byte> piece) {
  while (!piece.empty()) {
    auto& buffer = buffers_[turn_];
    buffer.arrived.wait();
    const auto from = offset - buffer.offset;
    const auto length = std::min<uint64_t>(piece.size(), buffer.bytes - from);
    std::memcpy(piece.data(), static_cast<const std::byte*>(buffer.pinned.const_data_ptr()) + from,
                length);
    piece = piece.subspan(length);
    offset += length;
    if (from + length == buffer.bytes) {
      ask(buffer);
      turn_ = 1 - turn_;
    }
  }
}

void copy_to_device(std::span<const std::byte> bytes, const at::Tensor& target) {
  if (bytes.empty()) {
    return;
  }
  const auto into = as_bytes(target);
  std::array<at::Tensor, 2> pinned;
  std::array<Fence, 2> gone;
  size_t turn = 0;
  for (uint64_t offset = 0; offset < bytes.size(); offset += kPieceBytes) {
    const auto length = std::min<uint64_t>(kPieceBytes, bytes.size() - offset);
    if (!pinned[turn].defined()) {
      pinned[turn] = pinned_bytes(length);
    }
    gone[turn].wait();
    const auto piece = stretch(pinned[turn], 0, length);
    std::memcpy(piece.mutable_data_ptr(), bytes.data() + offset, length);
    stretch(into, offset, length).copy_(piece, /*non_blocking=*/true);
    gone[turn] = Fence::record(target.device());
    turn = 1 - turn;
  }
}

}  // namespace tenure::store
