// Interned values: equal ones are kept once and known by a number, for as long as somebody counts
// on it. Threading: the holder's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

namespace tenure::store {

template <class Value, class Hash = std::hash<Value>>
class Interned {
 public:
  // The number of `value`, which is kept until drop() was called as often as take().
  uint32_t take(const Value& value) {
    const auto [place, is_new] = numbers_.try_emplace(value, 0);
    if (is_new) {
      if (free_.empty()) {
        free_.push_back(static_cast<uint32_t>(entries_.size()));
        entries_.emplace_back();
      }
      place->second = free_.back();
      free_.pop_back();
      entries_[place->second] = {&place->first, 0};
    }
    ++entries_[place->second].users;
    return place->second;
  }

  void drop(uint32_t number) {
    auto& entry = entries_[number];
    if (--entry.users == 0) {
      numbers_.erase(numbers_.find(*entry.value));
      entry.value = nullptr;
      free_.push_back(number);
    }
  }

  [[nodiscard]] const Value& at(uint32_t number) const { return *entries_[number].value; }
  [[nodiscard]] size_t size() const { return numbers_.size(); }

 private:
  struct Entry {
    const Value* value = nullptr;
    uint64_t users = 0;
  };
  std::unordered_map<Value, uint32_t, Hash> numbers_;  // its nodes stay where they are
  std::vector<Entry> entries_;
  std::vector<uint32_t> free_;
};

// Mixes the hash of another part into `seed`.
inline size_t mix_hash(size_t seed, size_t part) {
  return (seed ^ part) * 0x9E3779B97F4A7C15ULL + (seed >> 29);
}

}  // namespace tenure::store
