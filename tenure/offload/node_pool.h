// NodePool: memory for nodes of one size, of which a step takes thousands and backward gives all
// back. Each costs a few instructions, where malloc has to look for room by then. What a pool has
// taken of the system it has until its owner and the last node are gone. Nodes of a step fill more
// than the nearest cache: the next one is fetched while the last one is used.
//
// One thread at a time takes, any thread gives back, also after the owner is gone.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace tenure::offload {

class NodePool {
 public:
  struct Leave {
    void operator()(NodePool* pool) const { pool->add(pool->taken_); }
  };
  using Owned = std::unique_ptr<NodePool, Leave>;

  static Owned make() { return Owned(new NodePool); }
  NodePool(const NodePool&) = delete;
  NodePool& operator=(const NodePool&) = delete;

  // REQUIRES the same size each time.
  void* take(size_t bytes) {
    if (free_ == nullptr) {
      free_ = returned_.exchange(nullptr, std::memory_order_acquire);
    }
    if (free_ == nullptr) {
      grow(bytes);
    }
    ++taken_;
    auto* out = std::exchange(free_, free_->next);
    for (size_t i = 0; i < bytes && free_ != nullptr; i += kLine) {
      __builtin_prefetch(reinterpret_cast<std::byte*>(free_) + i, 1);
    }
    return out;
  }

  void give(void* node) noexcept {
    auto* mine = ::new (node) Node{.next = returned_.load(std::memory_order_relaxed)};
    while (!returned_.compare_exchange_weak(mine->next, mine, std::memory_order_release,
                                            std::memory_order_relaxed)) {
    }
    add(-1);
  }

 private:
  static constexpr size_t kNodes = 64;  // of a block
  static constexpr size_t kLine = 64;   // bytes, of the processor's cache

  struct Node {
    Node* next = nullptr;
  };

  NodePool() = default;
  ~NodePool() = default;

  void grow(size_t bytes) {
    constexpr auto align = alignof(std::max_align_t);
    const auto stride = (bytes + align - 1) / align * align;
    auto& block = blocks_.emplace_back(new std::byte[kNodes * stride]);
    for (size_t i = kNodes; i-- > 0;) {
      free_ = ::new (block.get() + i * stride) Node{.next = free_};
    }
  }

  // Below nothing until the owner leaves, which adds those that were taken: then what is out.
  void add(int64_t nodes) {
    if (out_.fetch_add(nodes, std::memory_order_acq_rel) == -nodes) {
      delete this;
    }
  }

  Node* free_ = nullptr;
  std::vector<std::unique_ptr<std::byte[]>> blocks_;  // NOLINT(*-avoid-c-arrays)
  std::atomic<Node*> returned_ = nullptr;
  int64_t taken_ = 0;
  std::atomic<int64_t> out_ = 0;  // see add()
};

// For std::allocate_shared.
template <class T>
class FromPool {
 public:
  using value_type = T;

  explicit FromPool(NodePool& pool) : pool_(&pool) {}
  template <class U>
  // NOLINTNEXTLINE(google-explicit-constructor): as allocators are
  FromPool(const FromPool<U>& other) : pool_(other.pool()) {}

  T* allocate(size_t /*one*/) {
    static_assert(alignof(T) <= alignof(std::max_align_t));
    return static_cast<T*>(pool_->take(sizeof(T)));
  }
  void deallocate(T* node, size_t /*one*/) noexcept { pool_->give(node); }

  NodePool* pool() const { return pool_; }
  friend bool operator==(const FromPool&, const FromPool&) = default;

 private:
  NodePool* pool_;
};

}  // namespace tenure::offload
