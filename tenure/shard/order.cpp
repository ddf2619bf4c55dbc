#include <tenure/shard/order.h>

#include <algorithm>
#include <utility>

namespace tenure::shard {

void Order::use(Use use) {
  const auto at = current_.size();
  following_ = following_ && at < known_.size() && known_[at] == use;
  if (at == kLongest) {
    end_pass();
    following_ = false;
  }
  current_.push_back(use);
}

void Order::end_pass() {
  const bool same = following_ && current_.size() == known_.size();
  if (!same && !current_.empty()) {
    changes_ += known_.empty() ? 0 : 1;
    known_ = std::exchange(current_, {});
  }
  current_.clear();
  following_ = !known_.empty();
}

std::vector<Use> Order::ahead(size_t count) const {
  if (!following_) {
    return {};
  }
  const auto begin = known_.begin() + static_cast<std::ptrdiff_t>(current_.size());
  const auto left = static_cast<size_t>(known_.end() - begin);
  return {begin, begin + static_cast<std::ptrdiff_t>(std::min(count, left))};
}

}  // namespace tenure::shard
