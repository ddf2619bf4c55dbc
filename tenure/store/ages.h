// Ages: objects in the order in which they were put, for choosing what to spill. Freed ones are
// swept out as they come to outnumber the others. Threading: the holder's lock.
#pragma once

#include <tenure/store/identity.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>

namespace tenure::store {

class Ages {
 public:
  // `is_live(id)` says which may be forgotten.
  template <class IsLive>
  void add(ObjectId id, const IsLive& is_live) {
    ids_.push_back(id);
    if (ids_.size() > sweep_at_) {
      std::erase_if(ids_, [&](ObjectId old) { return !is_live(old); });
      sweep_at_ = std::max(kLeastSweep, ids_.size() * 2);
    }
  }
  void add_oldest(ObjectId id) { ids_.push_front(id); }
  std::optional<ObjectId> take_oldest() {
    if (ids_.empty()) {
      return std::nullopt;
    }
    const auto id = ids_.front();
    ids_.pop_front();
    return id;
  }
  [[nodiscard]] size_t size() const { return ids_.size(); }

 private:
  static constexpr size_t kLeastSweep = 4096;
  std::deque<ObjectId> ids_;
  size_t sweep_at_ = kLeastSweep;
};

}  // namespace tenure::store
