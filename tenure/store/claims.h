// Claims: which of an object's collectors have yet to fetch it. Collector sets are interned; what
// is pending is one word for an object: the count, or a bit for each collector, or, for more than
// 64 collectors, the number of a row in a side table.
//
// Note [Which collector a fetch fills]
// The most specific pending one that fits the member: its role and rank, then its role at any rank,
// then its rank of any role, then anyone. A member that is listed by role and rank fills no other
// place than that, however often it fetches: another one's place stays open for that other.
//
// Threading: the holder's lock.
#pragma once

#include <tenure/store/collectors.h>
#include <tenure/store/identity.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tenure::store {

// Throws InputError for a set that cannot be one: too many, a role that is none.
void check_collectors(const Collectors& collectors);

class Claims {
 public:
  struct Claim {
    uint32_t set;
    uint64_t pending;
  };
  // All of `collectors` pending. REQUIRES: not nobody().
  Claim take(const Collectors& collectors);
  void drop(uint32_t set, uint64_t pending);

  [[nodiscard]] bool may_fetch(uint32_t set, const Member& member) const;
  // The member has it. Returns whether nobody is left to fetch it.
  bool fill(uint32_t set, uint64_t& pending, const Member& member);
  // Those that `member` alone could fill are waited for no longer: its role and rank, and, if no
  // other of its rank is there, its rank of any role. Returns how many they were.
  enum class OfItsRank : uint8_t { alone, others };
  uint32_t lapse(uint32_t set, uint64_t& pending, const Member& member, OfItsRank is);
  // The member had begun to fetch and will not come back: the place that its fetch would have
  // filled is waited for no longer, unless lapse() is what decides over it. Returns whether there
  // was one.
  bool give_up(uint32_t set, uint64_t& pending, const Member& member);
  // Whether nobody is left. Never for `anyone`.
  [[nodiscard]] bool done(uint32_t set, uint64_t pending) const;

  [[nodiscard]] const Collectors& collectors(uint32_t set) const { return *sets_[set].collectors; }
  // "trainer 3"; "2 fetches by anyone". `gone(role)` names the last member of that role (empty: of
  // any) that went and did not come back, if no other is there: "any trainer (trainer 3, the last
  // one here, did not come back)".
  using Gone = std::function<std::optional<Member>(const std::string& role)>;
  [[nodiscard]] std::vector<std::string> waiting(uint32_t set, uint64_t pending,
                                                 const Gone& gone) const;

 private:
  using Key = std::pair<std::string, std::optional<int32_t>>;
  struct Set {
    const Collectors* collectors = nullptr;
    const std::string* name = nullptr;
    uint64_t users = 0;
    std::map<Key, std::vector<uint32_t>> places;
  };

  [[nodiscard]] const std::vector<uint32_t>* places(const Set& set, const Key& key) const;
  [[nodiscard]] bool wide(const Set& set) const;
  [[nodiscard]] bool is_pending(const Set& set, uint64_t pending, uint32_t place) const;
  void clear(const Set& set, uint64_t& pending, uint32_t place);

  std::unordered_map<std::string, std::pair<uint32_t, Collectors>> numbers_;
  std::vector<Set> sets_;
  std::vector<uint32_t> free_sets_;
  std::vector<std::vector<uint64_t>> rows_;  // of sets with more than 64 collectors
  std::vector<uint32_t> free_rows_;
};

}  // namespace tenure::store
