// Consumers: the processes that fetch, their leases, and what they have mapped. A consumer is a
// member, whatever the number of its connections.
//
// Threading: the holder's lock.
#pragma once

#include <tenure/store/content.h>
#include <tenure/store/identity.h>
#include <tenure/store/ledger.h>
#include <tenure/store/objects.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tenure::store {

struct ObjectIdHash {
  size_t operator()(ObjectId id) const {
    return std::hash<uint64_t>()(uint64_t{id.slot} << 32 | id.generation);
  }
};

// An object that a consumer has mapped.
struct MappedObject {
  uint64_t times = 0;
  int64_t since_ms = 0;
  uint64_t bytes = 0;
  std::shared_ptr<const ScopeName> scope;
  std::weak_ptr<const Content> content;  // handles that share one share its memory
};

// Objects that a consumer has begun to fetch and has not said to have: with some a place of Claims
// is its own while it lives (Note [Which collector a fetch fills]).
class Begun {
 public:
  enum class Place : uint8_t { waiting, given_up };

  // `is_live(id)` says which may be forgotten.
  template <class IsLive>
  void add(ObjectId id, const IsLive& is_live) {
    if (places_.size() >= sweep_at_) {
      std::erase_if(places_, [&](const auto& entry) { return !is_live(entry.first); });
      sweep_at_ = std::max(kLeastSweep, 2 * places_.size());
    }
    places_.try_emplace(id, Place::waiting);
  }
  // It has it. Whether its place was given up before, and is not to be filled again.
  bool end(ObjectId id) {
    const auto entry = places_.find(id);
    if (entry == places_.end()) {
      return false;
    }
    const bool given_up = entry->second == Place::given_up;
    places_.erase(entry);
    return given_up;
  }
  // Adds those whose place it still had.
  void give_up(std::vector<ObjectId>& to) {
    for (auto& [id, place] : places_) {
      if (std::exchange(place, Place::given_up) == Place::waiting) {
        to.push_back(id);
      }
    }
  }
  // It goes on where `other`, who is gone for good, has ended.
  void inherit(const Begun& other) {
    for (const auto& [id, place] : other.places_) {
      if (place == Place::waiting) {
        places_.try_emplace(id, Place::waiting);
      }
    }
  }

 private:
  static constexpr size_t kLeastSweep = 1024;
  std::unordered_map<ObjectId, Place, ObjectIdHash> places_;
  size_t sweep_at_ = kLeastSweep;
};

struct Consumer {
  Member member;
  uint32_t connections = 0;
  int64_t until_ms = 0;  // of its lease, by the steady clock
  bool lapsed = false;
  std::unordered_map<ObjectId, MappedObject, ObjectIdHash> mapped;
  Begun begun;
};

class Consumers {
 public:
  ConsumerId admit(const Member& member, int64_t until_ms);
  // One connection less. With the last one what it had mapped is forgotten.
  void part(ConsumerId consumer, int64_t until_ms);
  void renew(ConsumerId consumer, int64_t until_ms);
  // Null if it is not known, or not any more.
  [[nodiscard]] Consumer* find(ConsumerId consumer);

  struct Gone {
    Member member;
    std::vector<ObjectId> begun;
  };
  struct Lapse {
    size_t consumers = 0;
    std::vector<Gone> members;  // those whose role and rank no other consumer has
  };
  // Those whose lease ended. Without a connection they are forgotten; what they had begun is then
  // begun by another of their role and rank, if one is here.
  Lapse lapse(int64_t now_ms);

  // Of this role (empty: of any): the last one whose lease ended, if no other is here.
  [[nodiscard]] std::optional<Member> gone(const std::string& role) const;

  [[nodiscard]] const std::unordered_map<uint64_t, Consumer>& all() const { return consumers_; }

 private:
  // Of this role and rank, one whose lease has not ended. Null: there is none.
  Consumer* stand_in(const Member& member);

  uint64_t latest_ = 0;
  std::unordered_map<uint64_t, Consumer> consumers_;
  std::unordered_map<Member, uint64_t, MemberHash> ids_;
  std::unordered_map<std::string, Member> gone_;  // by role, and by "" the last of all
};

}  // namespace tenure::store
