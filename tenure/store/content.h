// Content: the bytes of an object, where they lie: in a sealed memfd, in a slab, or spilled to a
// file. Immutable once made. Torch-free. Threading: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tenure::store {

class Content {
 public:
  Content() = default;
  Content(const Content&) = delete;
  Content& operator=(const Content&) = delete;
  Content(Content&&) = delete;
  Content& operator=(Content&&) = delete;
  virtual ~Content() = default;

  [[nodiscard]] virtual uint64_t bytes() const = 0;
  // A descriptor of its own to pass to another process: a memfd that is sealed against writing,
  // growing and shrinking, whose whole is the object. -1 if it has none. Stays open and the
  // content's own for as long as the content lives.
  [[nodiscard]] virtual int descriptor() const { return -1; }
  // A descriptor from which sendfile() sends: the memfd or the spilled file, whose whole is the
  // object. -1 for a slab, and for a small one that was spilled: that has no memory either, and is
  // read().
  [[nodiscard]] virtual int file() const { return descriptor(); }
  // The bytes in memory, for a slab. Empty otherwise.
  [[nodiscard]] virtual std::span<const std::byte> memory() const { return {}; }
  // Copies from `offset` on into all of `to`, wherever the bytes lie. Throws tenure::Error.
  virtual void read(uint64_t offset, std::span<std::byte> to) const = 0;
};

}  // namespace tenure::store
