#include <tenure/store/recent_puts.h>

#include <tenure/store/interned.h>

#include <algorithm>

namespace tenure::store {

namespace {

constexpr size_t kMostParts = 16'384;  // of one storage

// The elements of such a view are others than those that lie in the storage.
bool shows_others(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

}  // namespace

RecentPuts::Part RecentPuts::part_of(const at::Tensor& tensor) {
  Part part{.offset = static_cast<uint64_t>(tensor.storage_offset()) * tensor.itemsize(),
            .bytes = tensor.nbytes(),
            .lie = 0};
  if (!tensor.is_contiguous()) {
    part.lie = tensor.itemsize();
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      part.lie = mix_hash(part.lie, static_cast<size_t>(tensor.size(i)));
      part.lie = mix_hash(part.lie, static_cast<size_t>(tensor.stride(i)));
    }
  }
  return part;
}

void RecentPuts::note(const at::Tensor& tensor, ObjectId id) {
  if (shows_others(tensor)) {
    return;
  }
  const Put put{.part = part_of(tensor), .id = id, .version = version_of(tensor)};
  const std::scoped_lock lock(mutex_);
  if (puts_.size() >= sweep_at_) {
    std::erase_if(puts_, [](const auto& entry) { return !entry.first.alive(); });
    sweep_at_ = std::max<size_t>(256, 2 * puts_.size());
  }
  auto& parts = puts_[StorageRef(tensor)];
  auto place = std::ranges::lower_bound(parts, put.part, {}, &Put::part);
  if (place != parts.end() && place->part == put.part) {
    *place = put;
    return;
  }
  if (parts.size() == kMostParts) {
    parts.clear();
    place = parts.end();
  }
  parts.insert(place, put);
}

std::optional<ObjectId> RecentPuts::find(const at::Tensor& tensor) {
  if (shows_others(tensor)) {
    return std::nullopt;
  }
  const auto part = part_of(tensor);
  const std::scoped_lock lock(mutex_);
  const auto found = puts_.find(StorageRef(tensor));
  if (found == puts_.end()) {
    return std::nullopt;
  }
  const auto put = std::ranges::lower_bound(found->second, part, {}, &Put::part);
  const bool same =
      put != found->second.end() && put->part == part && put->version == version_of(tensor);
  return same ? std::optional(put->id) : std::nullopt;
}

}  // namespace tenure::store
