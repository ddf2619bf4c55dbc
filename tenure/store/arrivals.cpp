#include <tenure/store/arrivals.h>

#include <tenure/core/owner.h>
#include <tenure/core/text.h>
#include <tenure/store/tensors.h>

#include <algorithm>

namespace tenure::store {

namespace {

constexpr size_t kMostRemembered = 65'536;

// The latest of them.
template <class Value>
void remember(std::set<Value>& all, std::deque<Value>& order, Value value) {
  if (!all.insert(value).second) {
    return;
  }
  order.push_back(std::move(value));
  if (order.size() > kMostRemembered) {
    all.erase(order.front());
    order.pop_front();
  }
}

// Inference tensors have no version: their writes are found by looking at the bytes.
uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

bool is_all_of(const at::Tensor& tensor, const Handle& handle) {
  return tensor.is_contiguous() && tensor.storage_offset() == 0 && !tensor.is_conj() &&
         !tensor.is_neg() && tensor.scalar_type() == scalar_type_of(handle.layout.dtype) &&
         std::ranges::equal(tensor.sizes(), handle.layout.shape) &&
         tensor.nbytes() == tensor.storage().nbytes();
}

}  // namespace

void Arrivals::note(const at::Tensor& tensor, const Handle& handle,
                    const std::shared_ptr<const Mapping>& mapping) {
  const std::scoped_lock lock(mutex_);
  if (arrivals_.size() >= sweep_at_) {
    sweep();
  }
  arrivals_.insert_or_assign(StorageRef(tensor), Arrival{.handle = handle,
                                                         .is_mapped = mapping != nullptr,
                                                         .mapping = mapping,
                                                         .version = version_of(tensor)});
}

// What is dead costs a hundred bytes each: kept in proportion to what is alive.
void Arrivals::sweep() {
  std::erase_if(arrivals_, [](const auto& entry) { return !entry.first.alive(); });
  sweep_at_ = std::max<size_t>(1024, 2 * arrivals_.size());
}

std::optional<Arrivals::Known> Arrivals::arrived_as(const at::Tensor& tensor) {
  const std::scoped_lock lock(mutex_);
  if (arrivals_.empty()) {
    return std::nullopt;
  }
  const auto found = arrivals_.find(StorageRef(tensor));
  if (found == arrivals_.end()) {
    return std::nullopt;
  }
  const auto& arrival = found->second;
  if (arrival.version != version_of(tensor) || !is_all_of(tensor, arrival.handle)) {
    return std::nullopt;
  }
  auto mapping = arrival.mapping.lock();
  // share_memory_() and others give a storage other memory.
  if (arrival.is_mapped && (!mapping || mapping->data() != tensor.storage().data())) {
    return std::nullopt;
  }
  return Known{.handle = arrival.handle, .mapping = std::move(mapping)};
}

Arrivals::Key Arrivals::key_of(const Handle& handle) {
  return {handle.origin->owner.incarnation, handle.id.slot, handle.id.generation};
}

uint64_t Arrivals::moment() {
  const std::scoped_lock lock(mutex_);
  return moment_;
}

void Arrivals::keep(const Handle& handle, const at::Tensor& tensor, uint64_t since) {
  const auto& owner = handle.origin->owner;
  const auto name = text(scope_text(handle.scope), " of ", member_text(owner));
  Kept kept{.scope = handle.scope,
            .bytes = tensor.nbytes(),
            .alias = Alias(tensor, intern_owner(OwnerKind::stored_object, name))};
  const std::scoped_lock lock(mutex_);
  const Key key = key_of(handle);
  if (closed_.contains({owner.incarnation, handle.scope}) || closed_.contains({0, handle.scope}) ||
      withdrawn_.contains(key)) {
    return;
  }
  const auto forgotten = forgotten_.find(key);
  const auto with_scope = forgotten_scopes_.find(handle.scope);
  if ((forgotten != forgotten_.end() && forgotten->second > since) ||
      (with_scope != forgotten_scopes_.end() && with_scope->second > since)) {
    return;
  }
  kept_.try_emplace(key, std::move(kept));
}

std::optional<at::Tensor> Arrivals::kept(const Handle& handle) {
  const std::scoped_lock lock(mutex_);
  const auto found = kept_.find(key_of(handle));
  return found == kept_.end() ? std::nullopt : std::optional(found->second.alias.tensor());
}

uint64_t Arrivals::kept_bytes() {
  const std::scoped_lock lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& [key, kept] : kept_) {
    bytes += kept.bytes;
  }
  return bytes;
}

// The leases end outside the lock: what a storage's deleter runs is not ours.
template <class Goes>
size_t Arrivals::drop(const Goes& goes) {
  std::vector<Kept> gone;
  {
    const std::scoped_lock lock(mutex_);
    for (auto entry = kept_.begin(); entry != kept_.end();) {
      if (goes(entry->first, entry->second)) {
        gone.push_back(std::move(entry->second));
        entry = kept_.erase(entry);
      } else {
        ++entry;
      }
    }
  }
  return gone.size();
}

size_t Arrivals::forget(std::span<const Handle> handles) {
  std::vector<Kept> gone;  // ends after the lock
  const std::scoped_lock lock(mutex_);
  ++moment_;
  for (const auto& handle : handles) {
    const Key key = key_of(handle);
    if (forgotten_.insert_or_assign(key, moment_).second) {
      forgotten_order_.push_back(key);
    }
    if (forgotten_order_.size() > kMostRemembered) {
      forgotten_.erase(forgotten_order_.front());
      forgotten_order_.pop_front();
    }
    if (auto kept = kept_.extract(key)) {
      gone.push_back(std::move(kept.mapped()));
    }
  }
  return gone.size();
}

size_t Arrivals::forget(const ScopeName& scope) {
  {
    const std::scoped_lock lock(mutex_);
    if (forgotten_scopes_.size() >= kMostRemembered) {
      forgotten_scopes_.clear();
    }
    forgotten_scopes_[scope] = ++moment_;
  }
  return drop([&](const Key& /*key*/, const Kept& kept) { return kept.scope == scope; });
}

size_t Arrivals::kept_of(const ScopeName& scope) {
  const std::scoped_lock lock(mutex_);
  return static_cast<size_t>(
      std::ranges::count_if(kept_, [&](const auto& entry) { return entry.second.scope == scope; }));
}

void Arrivals::scope_closed(const Member& owner, const ScopeName& scope) {
  {
    const std::scoped_lock lock(mutex_);
    remember(closed_, closed_order_, Closed{owner.incarnation, scope});
  }
  drop([&](const Key& key, const Kept& kept) {
    return std::get<0>(key) == owner.incarnation && kept.scope == scope;
  });
}

void Arrivals::scope_closed_by_us(const ScopeName& scope) {
  {
    const std::scoped_lock lock(mutex_);
    remember(closed_, closed_order_, Closed{0, scope});
  }
  drop([&](const Key& /*key*/, const Kept& kept) { return kept.scope == scope; });
}

void Arrivals::withdrawn(const Member& owner, std::span<const ObjectId> ids) {
  std::vector<Kept> gone;  // ends after the lock
  const std::scoped_lock lock(mutex_);
  for (const auto id : ids) {
    const Key key{owner.incarnation, id.slot, id.generation};
    remember(withdrawn_, withdrawn_order_, key);
    if (auto kept = kept_.extract(key)) {
      gone.push_back(std::move(kept.mapped()));
    }
  }
}

void Arrivals::owner_lost(const Member& owner) {
  drop([&](const Key& key, const Kept& /*kept*/) { return std::get<0>(key) == owner.incarnation; });
}

}  // namespace tenure::store
