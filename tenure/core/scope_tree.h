// ScopeTree: the open scopes of a process and how they nest. It knows nothing of threads' stacks or
// Python contexts (scope.h does) and nothing of what a lease holds (lease_table.h does); it hands
// out nodes, keeps them alive while they are open, and says what was wrong when a close is refused.
// Any thread may call.
#pragma once

#include <tenure/core/lock.h>
#include <tenure/core/names.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tenure {

// Shards of the lease table; a node keeps one list head for each.
inline constexpr size_t kShards = 64;

// Never reused: a serial number, with the depth and the node's place packed below it, so that a
// stale id is recognised and two ids are compared for depth without a lookup.
enum class ScopeId : uint64_t { process = 0 };
constexpr uint32_t depth_of(ScopeId id) {
  return static_cast<uint32_t>(static_cast<uint64_t>(id) >> 16) & 0xff;
}
inline constexpr uint32_t kDeepestScope = 255;
inline constexpr uint32_t kMostOpenScopes = 65536;

// What closing does with leases that are still in the scope.
enum class OnClose : uint8_t {
  report,   // say so; they move to the parent scope
  release,  // release them
  raise,    // throw ScopeError; they move to the parent scope
};

// What closing does about scopes that are still open inside.
enum class Inside : uint8_t {
  refuse,   // throw ScopeError
  move_up,  // they lie in the parent scope from now on
};

struct ScopeLabel {
  NameId name = NameId::none;
  std::optional<int64_t> count;
};
// "step 12"
std::string label_text(const ScopeLabel& label);

// One open scope. `first` is guarded by the locks of the lease table, shard by shard; `touched` has
// a bit for each shard whose list was ever used; the rest is guarded by the tree.
struct ScopeNode {
  static constexpr uint64_t kClosed = ~uint64_t{0};

  std::atomic<uint64_t> id{kClosed};
  std::atomic<uint64_t> touched{0};
  std::array<uint32_t, kShards> first{};

  ScopeLabel label;
  ScopeId parent = ScopeId::process;
  OnClose on_close = OnClose::report;
  uint32_t children = 0;
  uint32_t moved_up = 0;  // children that its close has left open
  uint64_t thread = 0;    // who opened it
};

class ScopeTree {
 public:
  // `first_serial` lets a forked child go on counting where its parent was, so that an inherited id
  // is never taken for one of its own.
  explicit ScopeTree(uint64_t first_serial = 1);
  ScopeTree(const ScopeTree&) = delete;
  ScopeTree& operator=(const ScopeTree&) = delete;

  // A stale parent counts as the process scope. Throws ScopeError when nested too deep.
  ScopeId open(ScopeLabel label, OnClose on_close, ScopeId parent);

  // First half of a close: afterwards no lease can enter the scope, and it keeps its place and its
  // parent. Throws ScopeError, changing nothing, if it is not open, was opened by another thread,
  // or still has an open child and is to refuse then. A child that is being closed by another
  // thread is waited for.
  ScopeNode& begin_close(ScopeId id, Inside inside = Inside::refuse);
  // Second half: the node may be reused.
  void end_close(ScopeNode& node, ScopeId id);

  bool is_open(ScopeId id) const { return id == ScopeId::process || find(id) != nullptr; }
  // Null unless open. The answer may be out of date at once: a lease table checks again under its
  // lock.
  ScopeNode* find(ScopeId id) const {
    auto* chunk = chunks_[place_of(id) / kChunk].load(std::memory_order_acquire);
    if (chunk == nullptr) {
      return nullptr;  // an id of the parent process
    }
    auto& node = chunk[place_of(id) % kChunk];
    return node.id.load(std::memory_order_acquire) == static_cast<uint64_t>(id) ? &node : nullptr;
  }
  // The node at the id's place, whatever it is now.
  ScopeNode& place(ScopeId id) const {
    return chunks_[place_of(id) / kChunk].load(std::memory_order_acquire)[place_of(id) % kChunk];
  }

  // "process", "step 12" or "closed scope".
  std::string name(ScopeId id) const;
  // "epoch 1 / step 12"
  std::string path(ScopeId id) const;
  std::optional<ScopeLabel> label(ScopeId id) const;
  ScopeId parent(ScopeId id) const;
  // Takes no lock: a forked child asks the tree that its parent left behind.
  uint64_t next_serial() const { return serial_.load(std::memory_order_relaxed); }

 private:
  ScopeNode& add_node();
  bool move_children_up(ScopeNode& node, ScopeId id);
  static constexpr uint32_t place_of(ScopeId id) {
    return static_cast<uint32_t>(static_cast<uint64_t>(id) % kMostOpenScopes);
  }

  static constexpr size_t kChunk = 256;
  mutable Lock mutex_;
  // Chunks never move and are never freed before the tree, so a node's place stays valid.
  std::array<std::atomic<ScopeNode*>, kMostOpenScopes / kChunk> chunks_{};
  std::vector<std::unique_ptr<ScopeNode[]>> owned_;
  std::vector<uint32_t> free_;
  uint32_t places_ = 0;
  std::atomic<uint64_t> serial_;
};

// A number for the calling thread, never reused.
uint64_t this_thread_number();

}  // namespace tenure
