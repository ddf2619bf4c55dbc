// A file descriptor that closes itself: of a socket, a memory file, a spilled one. A forked child
// closes its copies at once: otherwise it would keep the connections of a dead parent open, so that
// nobody would learn of that death, and the memory of what its parent frees. Torch-free.
#pragma once

#include <cstdint>

namespace tenure::store {

// Move-only; one thread at a time. In a forked child it owns nothing.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int descriptor);
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();

  [[nodiscard]] int get() const { return descriptor_; }
  [[nodiscard]] bool is_open() const { return descriptor_ >= 0; }
  void close();

 private:
  int descriptor_ = -1;
  uint32_t generation_ = 0;  // of forks
};

}  // namespace tenure::store
