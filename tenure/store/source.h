// Source: the bytes of an object on their way in, either whole in memory or made piece by piece.
// Torch-free. Threading: one thread. Owns nothing: what it refers to outlives it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace tenure::store {

using Fill = std::function<void(uint64_t offset, std::span<std::byte> piece)>;

class Source {
 public:
  explicit Source(std::span<const std::byte> whole) : bytes_(whole.size()), whole_(whole) {}
  // `fill` is called for pieces in order, each of at most `piece_bytes`, which is not 0.
  Source(uint64_t bytes, uint64_t piece_bytes, const Fill& fill)
      : bytes_(bytes), piece_bytes_(piece_bytes), fill_(&fill) {}

  [[nodiscard]] uint64_t bytes() const { return bytes_; }

  // Each takes the bytes from the first to the last; what `fill` throws passes through.
  // REQUIRES: `to` has bytes() of room.
  void copy_to(std::byte* to) const;
  // Calls `take` for stretches in order, as large as they come.
  void drain(const std::function<void(std::span<const std::byte> stretch)>& take) const;

 private:
  uint64_t bytes_;
  std::span<const std::byte> whole_;
  uint64_t piece_bytes_ = 0;
  const Fill* fill_ = nullptr;
};

// Writes all of `stretch` at `offset`. Returns 0 or the errno with which it stopped.
int write_all(int fd, uint64_t offset, std::span<const std::byte> stretch);
// Reads all of `to` from `offset` on. Returns 0 or an errno; EIO where the file ends too soon.
int read_all(int fd, uint64_t offset, std::span<std::byte> to);

}  // namespace tenure::store
