#include <tenure/core/scope_tree.h>

#include <tenure/core/error.h>
#include <tenure/core/fast_tls.h>
#include <tenure/core/text.h>

#include <mutex>
#include <thread>

namespace tenure {
namespace {

ScopeId make_id(uint64_t serial, uint32_t depth, uint32_t place) {
  return ScopeId{(serial << 24) | (uint64_t{depth} << 16) | place};
}

}  // namespace

uint64_t this_thread_number() {
  static std::atomic<uint64_t> last{0};
  static TENURE_FAST_TLS uint64_t number = 0;
  if (number == 0) {
    number = last.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  return number;
}

std::string label_text(const ScopeLabel& label) {
  std::string out(name_of(label.name));
  if (label.count) {
    out += text(' ', *label.count);
  }
  return out;
}

ScopeTree::ScopeTree(uint64_t first_serial) : serial_(first_serial) {
  auto& process = add_node();
  process.label.name = intern("process");
  process.id.store(static_cast<uint64_t>(ScopeId::process), std::memory_order_release);
}

// REQUIRES: mutex_ held, or no other thread knows the tree yet.
ScopeNode& ScopeTree::add_node() {
  const auto place = places_;
  if (place % kChunk == 0) {
    owned_.push_back(std::make_unique<ScopeNode[]>(kChunk));
    chunks_[place / kChunk].store(owned_.back().get(), std::memory_order_release);
  }
  ++places_;
  return owned_.back()[place % kChunk];
}

ScopeId ScopeTree::open(ScopeLabel label, OnClose on_close, ScopeId parent) {
  std::lock_guard lock(mutex_);
  auto* above = find(parent);
  if (above == nullptr) {
    parent = ScopeId::process;
    above = &place(ScopeId::process);
  }
  const auto depth = depth_of(parent) + 1;
  if (depth > kDeepestScope) {
    throw ScopeError(text("scope '", label_text(label), "' would be nested ", depth,
                          " deep, inside '", label_text(above->label),
                          "': close scopes before opening more (a `with` block does)"));
  }
  if (free_.empty() && places_ == kMostOpenScopes) {
    throw ScopeError(text("scope '", label_text(label), "' would be one of more than ",
                          kMostOpenScopes, " open scopes: close scopes before opening more"));
  }
  uint32_t at = places_;
  if (free_.empty()) {
    add_node();
  } else {
    at = free_.back();
    free_.pop_back();
  }
  const auto id = make_id(serial_.fetch_add(1, std::memory_order_relaxed), depth, at);
  auto& node = place(id);
  node.label = label;
  node.parent = parent;
  node.on_close = on_close;
  node.children = 0;
  node.moved_up = 0;
  node.thread = this_thread_number();
  ++above->children;
  node.id.store(static_cast<uint64_t>(id), std::memory_order_release);
  return id;
}

// One that is being closed stays until it is: its leases come here. REQUIRES: mutex_. Returns
// whether none is left. Throws ScopeError if this thread is closing one, and so is waited for.
bool ScopeTree::move_children_up(ScopeNode& node, ScopeId id) {
  for (uint32_t i = 0; i < places_ && node.children != 0; ++i) {
    auto& child = owned_[i / kChunk][i % kChunk];
    if (child.parent != id) {
      continue;
    }
    if (child.id.load(std::memory_order_relaxed) == ScopeNode::kClosed) {
      if (child.thread == this_thread_number()) {
        throw ScopeError(text("scope '", label_text(node.label), "' cannot be closed while '",
                              label_text(child.label), "' inside it is being closed"));
      }
      continue;
    }
    child.parent = node.parent;
    --node.children;
    ++node.moved_up;
    ++place(node.parent).children;
  }
  return node.children == 0;
}

ScopeNode& ScopeTree::begin_close(ScopeId id, Inside inside) {
  std::unique_lock lock(mutex_);
  auto* node = find(id);
  if (node == nullptr) {
    throw ScopeError("this scope is closed already: close it once, or let its `with` block do it");
  }
  if (node->thread != this_thread_number()) {
    throw ScopeError(text("scope '", label_text(node->label), "' was opened by thread ",
                          node->thread, " and thread ", this_thread_number(),
                          " tried to close it: close it where it was opened"));
  }
  if (node->children != 0 && inside == Inside::refuse) {
    throw ScopeError(text("scope '", label_text(node->label), "' still has ",
                          count_text(node->children, "open scope"),
                          " inside it: close the inner one first"));
  }
  while (!move_children_up(*node, id)) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
  // Sequentially consistent with the lease table's check: see Note [A lease enters a scope].
  node->id.store(ScopeNode::kClosed, std::memory_order_seq_cst);
  return *node;
}

void ScopeTree::end_close(ScopeNode& node, ScopeId id) {
  std::lock_guard lock(mutex_);
  --place(node.parent).children;
  node.parent = ScopeId{ScopeNode::kClosed};
  free_.push_back(place_of(id));
}

std::string ScopeTree::name(ScopeId id) const {
  const auto found = label(id);
  return found ? label_text(*found) : "closed scope";
}

std::string ScopeTree::path(ScopeId id) const {
  std::lock_guard lock(mutex_);
  const auto* node = find(id);
  if (node == nullptr) {
    return "closed scope";
  }
  auto out = label_text(node->label);
  while (node->parent != ScopeId::process) {
    node = &place(node->parent);
    out = text(label_text(node->label), " / ", out);
  }
  return out;
}

std::optional<ScopeLabel> ScopeTree::label(ScopeId id) const {
  std::lock_guard lock(mutex_);
  const auto* node = find(id);
  return node == nullptr ? std::nullopt : std::optional(node->label);
}

ScopeId ScopeTree::parent(ScopeId id) const {
  std::lock_guard lock(mutex_);
  const auto* node = find(id);
  return node == nullptr ? ScopeId::process : node->parent;
}

}  // namespace tenure
