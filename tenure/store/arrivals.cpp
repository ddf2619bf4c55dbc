#include <tenure/store/arrivals.h>

#include <tenure/core/owner.h>
#include <tenure/core/text.h>
#include <tenure/store/tensors.h>

#include <algorithm>

namespace tenure::store {

namespace {

constexpr size_t kMostClosed = 65'536;

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

void Arrivals::note(const at::Tensor& tensor, const Handle& handle, const Mapping* mapping) {
  const std::scoped_lock lock(mutex_);
  if (arrivals_.size() >= sweep_at_) {
    sweep();
  }
  arrivals_.insert_or_assign(
      StorageRef(tensor),
      Arrival{.handle = handle, .mapping = mapping, .version = version_of(tensor)});
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
  return Known{.handle = arrival.handle, .mapping = arrival.mapping};
}

void Arrivals::keep(const Handle& handle, const at::Tensor& tensor) {
  const auto& owner = handle.origin->owner;
  const auto name = text(scope_text(handle.scope), " of ", member_text(owner));
  Kept kept{.scope = handle.scope,
            .bytes = tensor.nbytes(),
            .alias = Alias(tensor, intern_owner(OwnerKind::stored_object, name))};
  const std::scoped_lock lock(mutex_);
  if (closed_.contains({owner.incarnation, handle.scope}) || closed_.contains({0, handle.scope})) {
    return;
  }
  kept_.try_emplace({owner.incarnation, handle.id.slot, handle.id.generation}, std::move(kept));
}

std::optional<at::Tensor> Arrivals::kept(const Handle& handle) {
  const std::scoped_lock lock(mutex_);
  const auto found =
      kept_.find({handle.origin->owner.incarnation, handle.id.slot, handle.id.generation});
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

void Arrivals::remember(Closed closed) {
  if (!closed_.insert(closed).second) {
    return;
  }
  closed_order_.push_back(std::move(closed));
  if (closed_order_.size() > kMostClosed) {
    closed_.erase(closed_order_.front());
    closed_order_.pop_front();
  }
}

// The leases end outside the lock: what a storage's deleter runs is not ours.
template <class Goes>
void Arrivals::drop(const Goes& goes) {
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
}

void Arrivals::forget(const Handle& handle) {
  const Key gone{handle.origin->owner.incarnation, handle.id.slot, handle.id.generation};
  drop([&](const Key& key, const Kept& /*kept*/) { return key == gone; });
}

void Arrivals::scope_closed(const Member& owner, const ScopeName& scope) {
  {
    const std::scoped_lock lock(mutex_);
    remember({owner.incarnation, scope});
  }
  drop([&](const Key& key, const Kept& kept) {
    return std::get<0>(key) == owner.incarnation && kept.scope == scope;
  });
}

void Arrivals::scope_closed_by_us(const ScopeName& scope) {
  {
    const std::scoped_lock lock(mutex_);
    remember({0, scope});
  }
  drop([&](const Key& /*key*/, const Kept& kept) { return kept.scope == scope; });
}

void Arrivals::owner_lost(const Member& owner) {
  drop([&](const Key& key, const Kept& /*kept*/) { return std::get<0>(key) == owner.incarnation; });
}

}  // namespace tenure::store
