// Consumers: the processes that fetch, their leases, and what they have mapped. A consumer is a
// member, whatever the number of its connections.
//
// Threading: the holder's lock.
#pragma once

#include <tenure/store/content.h>
#include <tenure/store/identity.h>
#include <tenure/store/ledger.h>
#include <tenure/store/objects.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
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

struct Consumer {
  Member member;
  uint32_t connections = 0;
  int64_t until_ms = 0;  // of its lease, by the steady clock
  bool lapsed = false;
  std::unordered_map<ObjectId, MappedObject, ObjectIdHash> mapped;
};

class Consumers {
 public:
  ConsumerId admit(const Member& member, int64_t until_ms);
  // One connection less. With the last one what it had mapped is forgotten.
  void part(ConsumerId consumer, int64_t until_ms);
  void renew(ConsumerId consumer, int64_t until_ms);
  // Null if it is not known, or not any more.
  [[nodiscard]] Consumer* find(ConsumerId consumer);

  struct Lapse {
    size_t consumers = 0;
    std::vector<Member> members;  // those whose role and rank no other consumer has
  };
  // Those whose lease ended. Without a connection they are forgotten.
  Lapse lapse(int64_t now_ms);

  [[nodiscard]] const std::unordered_map<uint64_t, Consumer>& all() const { return consumers_; }

 private:
  uint64_t latest_ = 0;
  std::unordered_map<uint64_t, Consumer> consumers_;
  std::unordered_map<Member, uint64_t, MemberHash> ids_;
};

}  // namespace tenure::store
