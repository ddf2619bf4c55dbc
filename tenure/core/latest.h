// The last value that one thread published, for any thread to copy.
//
// Threading: publish() from one thread at a time; read() from any, at any time. A reader never
// waits for the publisher, also not for one that was suspended halfway through a publication or
// that a fork left behind: it copies the value before. It copies again only when a whole new
// publication overtook it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

namespace tenure {

template <class T>
class Latest {
  static_assert(std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T>);

 public:
  void publish(const T& value) {
    std::array<uint64_t, kWords> words{};
    std::memcpy(words.data(), &value, sizeof(T));
    const uint64_t next = published_.load(std::memory_order_relaxed) + 1;
    Slot& slot = slots_[next % 2];
    // Note [Two slots]: slot n % 2 is overwritten only for publication n + 2, so after n + 1 was
    // announced. The words are released so that a reader that saw one of n + 2 also sees that
    // announcement, and discards its copy.
    for (size_t i = 0; i < kWords; ++i) {
      slot[i].store(words[i], std::memory_order_release);
    }
    published_.store(next, std::memory_order_release);
  }

  // Nothing was published yet: nullopt.
  std::optional<T> read() const {
    uint64_t current = published_.load(std::memory_order_acquire);
    while (current != 0) {
      const Slot& slot = slots_[current % 2];
      std::array<uint64_t, kWords> words{};
      for (size_t i = 0; i < kWords; ++i) {
        words[i] = slot[i].load(std::memory_order_acquire);  // Note [Two slots]
      }
      const uint64_t after = published_.load(std::memory_order_acquire);
      if (after == current) {
        T value;
        std::memcpy(static_cast<void*>(&value), words.data(), sizeof(T));
        return value;
      }
      current = after;
    }
    return std::nullopt;
  }

 private:
  static constexpr size_t kWords = (sizeof(T) + sizeof(uint64_t) - 1) / sizeof(uint64_t);
  using Slot = std::array<std::atomic<uint64_t>, kWords>;

  std::array<Slot, 2> slots_{};
  std::atomic<uint64_t> published_{0};
};

}  // namespace tenure
