#include <tenure/store/recent_puts.h>

#include <algorithm>

namespace tenure::store {

namespace {

constexpr size_t kMostViews = 8;  // of one storage

}  // namespace

bool RecentPuts::Put::operator==(const Put& other) const {
  return version == other.version && type == other.type && offset == other.offset &&
         sizes == other.sizes && strides == other.strides;
}

RecentPuts::Put RecentPuts::put_of(const at::Tensor& tensor, ObjectId id) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  return {.id = id,
          .version = static_cast<uint32_t>(tensor._version()),
          .type = tensor.scalar_type(),
          .offset = tensor.storage_offset(),
          .sizes = {sizes.begin(), sizes.end()},
          .strides = {strides.begin(), strides.end()}};
}

void RecentPuts::note(const at::Tensor& tensor, ObjectId id) {
  if (tensor.is_inference() || tensor.is_conj() || tensor.is_neg()) {
    return;
  }
  const std::scoped_lock lock(mutex_);
  if (puts_.size() >= sweep_at_) {
    std::erase_if(puts_, [](const auto& entry) { return !entry.first.alive(); });
    sweep_at_ = std::max<size_t>(256, 2 * puts_.size());
  }
  auto& views = puts_[StorageRef(tensor)];
  auto put = put_of(tensor, id);
  std::erase(views, put);
  if (views.size() == kMostViews) {
    views.erase(views.begin());
  }
  views.push_back(std::move(put));
}

std::optional<ObjectId> RecentPuts::find(const at::Tensor& tensor) {
  if (tensor.is_inference() || tensor.is_conj() || tensor.is_neg()) {
    return std::nullopt;
  }
  const std::scoped_lock lock(mutex_);
  const auto found = puts_.find(StorageRef(tensor));
  if (found == puts_.end()) {
    return std::nullopt;
  }
  const auto same = std::ranges::find(found->second, put_of(tensor, {}));
  return same == found->second.end() ? std::nullopt : std::optional(same->id);
}

}  // namespace tenure::store
