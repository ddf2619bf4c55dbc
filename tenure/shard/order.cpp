#include <tenure/shard/order.h>

namespace tenure::shard {

std::string_view name_of(Phase phase) {
  switch (phase) {
    case Phase::forward:
      return "forward";
    case Phase::backward:
      return "backward";
    case Phase::reduce:
      return "the sum of its gradients";
    case Phase::end:
      return "the end of backward";
    case Phase::hold:
      return "a hold";
  }
  return "";
}

bool Order::use(Use use) {
  if (current_.size() == kLongest) {
    end_pass();
    following_ = false;
  }
  const auto at = current_.size();
  if (following_ && (at >= known_.size() || known_[at] != use)) {
    following_ = false;
    instead_ = at < known_.size() ? std::optional(known_[at]) : std::nullopt;
  }
  current_.push_back(use);
  return following_ && (at != 0 || !changed_);
}

void Order::end_pass() {
  if (current_.empty()) {
    return;
  }
  changed_ = !following_ || current_.size() != known_.size();
  if (changed_) {
    changes_ += known_.empty() ? 0 : 1;
    known_ = current_;
  }
  current_.clear();
  following_ = true;
  instead_.reset();
}

std::optional<Use> Order::next() const {
  const auto at = current_.size();
  return following_ && at < known_.size() ? std::optional(known_[at]) : std::nullopt;
}

std::vector<uint32_t> Order::ahead(size_t count) const {
  std::vector<uint32_t> out;
  for (auto at = current_.size(); following_ && at < known_.size() && out.size() < count; ++at) {
    if (known_[at].phase == Phase::end) {
      break;
    }
    if (known_[at].phase != Phase::reduce && known_[at].phase != Phase::hold) {
      out.push_back(known_[at].unit);
    }
  }
  return out;
}

}  // namespace tenure::shard
