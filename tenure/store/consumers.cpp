#include <tenure/store/consumers.h>

#include <algorithm>

namespace tenure::store {

ConsumerId Consumers::admit(const Member& member, int64_t until_ms) {
  const auto [place, is_new] = ids_.try_emplace(member, latest_ + 1);
  if (is_new) {
    consumers_[++latest_].member = member;
  }
  auto& consumer = consumers_[place->second];
  ++consumer.connections;
  consumer.until_ms = until_ms;
  consumer.lapsed = false;
  return ConsumerId{place->second};
}

void Consumers::part(ConsumerId consumer, int64_t until_ms) {
  auto* found = find(consumer);
  if (found == nullptr || found->connections == 0) {
    return;
  }
  if (--found->connections == 0) {
    found->mapped.clear();
    found->until_ms = until_ms;
  }
}

void Consumers::renew(ConsumerId consumer, int64_t until_ms) {
  if (auto* found = find(consumer)) {
    found->until_ms = until_ms;
    found->lapsed = false;
  }
}

Consumer* Consumers::find(ConsumerId consumer) {
  const auto found = consumers_.find(static_cast<uint64_t>(consumer));
  return found == consumers_.end() ? nullptr : &found->second;
}

Consumers::Lapse Consumers::lapse(int64_t now_ms) {
  Lapse out;
  for (auto& [id, consumer] : consumers_) {
    if (!consumer.lapsed && consumer.until_ms < now_ms) {
      consumer.lapsed = true;
      ++out.consumers;
      out.members.push_back(consumer.member);
    }
  }
  std::erase_if(out.members, [&](const Member& gone) {
    return std::ranges::any_of(consumers_, [&](const auto& entry) {
      const auto& other = entry.second;
      return !other.lapsed && other.member.role == gone.role && other.member.rank == gone.rank;
    });
  });
  std::erase_if(consumers_, [&](const auto& entry) {
    const auto& consumer = entry.second;
    if (!consumer.lapsed || consumer.connections != 0) {
      return false;
    }
    ids_.erase(consumer.member);
    return true;
  });
  return out;
}

}  // namespace tenure::store
