// Incoming: bytes of a connection that have arrived and were not looked at yet. It grows with what
// arrives, never with what a header promises. One thread at a time. Torch-free.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>

namespace tenure::store {

class Incoming {
 public:
  explicit Incoming(size_t first_room) : first_room_(first_room) {}

  [[nodiscard]] std::span<const std::byte> bytes() const {
    return {buffer_.get() + begin_, end_ - begin_};
  }
  [[nodiscard]] bool empty() const { return begin_ == end_; }

  // Where the next bytes go: never empty.
  std::span<std::byte> room() {
    if (begin_ == end_) {
      begin_ = end_ = 0;
    }
    if (end_ == capacity_) {
      make_room();
    }
    return {buffer_.get() + end_, capacity_ - end_};
  }
  // `count` bytes were written to the front of room().
  void arrived(size_t count) { end_ += count; }
  void consume(size_t count) { begin_ += count; }

  // Gives back what a long message made it take. REQUIRES: empty().
  void rest() {
    if (capacity_ > first_room_) {
      buffer_.reset();
      capacity_ = begin_ = end_ = 0;
    }
  }

 private:
  void make_room() {
    const size_t held = end_ - begin_;
    const size_t wanted = std::max(first_room_, 2 * held);
    if (wanted <= capacity_ && begin_ > 0) {
      std::memmove(buffer_.get(), buffer_.get() + begin_, held);
    } else {
      auto larger = std::make_unique_for_overwrite<std::byte[]>(wanted);
      if (held > 0) {
        std::memcpy(larger.get(), buffer_.get() + begin_, held);
      }
      buffer_ = std::move(larger);
      capacity_ = wanted;
    }
    begin_ = 0;
    end_ = held;
  }

  size_t first_room_;
  std::unique_ptr<std::byte[]> buffer_;
  size_t capacity_ = 0;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace tenure::store
