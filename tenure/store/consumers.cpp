#include <tenure/store/consumers.h>

#include <algorithm>

namespace tenure::store {
namespace {

constexpr size_t kMostGone = 1024;  // roles

bool same_rank(const Member& one, const Member& other) {
  return one.role == other.role && one.rank == other.rank;
}

}  // namespace

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
  std::vector<Consumer*> lapsed;
  for (auto& [id, consumer] : consumers_) {
    if (!consumer.lapsed && consumer.until_ms < now_ms) {
      consumer.lapsed = true;
      ++out.consumers;
      lapsed.push_back(&consumer);
    }
  }
  for (auto* const gone : lapsed) {
    if (stand_in(gone->member) == nullptr) {
      out.members.push_back({.member = gone->member, .begun = {}});
      for (auto& [id, consumer] : consumers_) {
        if (same_rank(consumer.member, gone->member)) {
          consumer.begun.give_up(out.members.back().begun);
        }
      }
    }
    if (gone_.size() < kMostGone || gone_.contains(gone->member.role)) {
      gone_[gone->member.role] = gone->member;
    }
    gone_[""] = gone->member;
  }
  std::erase_if(consumers_, [&](const auto& entry) {
    const auto& consumer = entry.second;
    if (!consumer.lapsed || consumer.connections != 0) {
      return false;
    }
    if (auto* const other = stand_in(consumer.member)) {
      other->begun.inherit(consumer.begun);
    }
    ids_.erase(consumer.member);
    return true;
  });
  return out;
}

Consumer* Consumers::stand_in(const Member& member) {
  const auto found = std::ranges::find_if(consumers_, [&](const auto& entry) {
    return !entry.second.lapsed && same_rank(entry.second.member, member);
  });
  return found == consumers_.end() ? nullptr : &found->second;
}

std::optional<Member> Consumers::gone(const std::string& role) const {
  const auto last = gone_.find(role);
  const bool some = std::ranges::any_of(consumers_, [&](const auto& entry) {
    return !entry.second.lapsed && (role.empty() || entry.second.member.role == role);
  });
  return last == gone_.end() || some ? std::nullopt : std::optional(last->second);
}

}  // namespace tenure::store
