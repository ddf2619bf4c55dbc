// ClosedRuns: the numbered scopes that were closed, "step 0" to "step 41327" as one entry. Where
// the numbers of a kind close one after the other this takes no more memory however many they are,
// and nothing is forgotten. A name's number is its last run of digits; a name without one is not
// kept.
//
// Threading: the holder's lock. Torch-free.
#pragma once

#include <tenure/store/identity.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <unordered_map>

namespace tenure::store {

inline constexpr size_t kClosedRuns = 16'384;

class ClosedRuns {
 public:
  void add(const ScopeName& scope);
  [[nodiscard]] bool contains(const ScopeName& scope) const;
  [[nodiscard]] size_t size() const { return ages_.size(); }

 private:
  // The names that differ in their number alone, and of each run its first number.
  struct Place {
    const std::string* family;
    uint64_t first;
  };
  struct Run {
    uint64_t last = 0;
    std::list<Place>::iterator age;
  };
  using Family = std::map<uint64_t, Run>;

  static bool holds(const Family& family, uint64_t number);
  void forget_oldest();

  std::unordered_map<std::string, Family> families_;
  std::list<Place> ages_;  // the one that was added to last is last
};

}  // namespace tenure::store
