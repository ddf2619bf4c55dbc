#include <tenure/store/departed.h>

#include <utility>

namespace tenure::store {

std::optional<Departed::Word> Departed::add(ObjectId id, const Word& word) {
  if (latest_.size() <= id.slot) {
    latest_.resize(id.slot + size_t{1}, kNone);
  }
  auto& latest = latest_[id.slot];
  const Record record{.id = id, .before = latest, .word = word};
  if (records_.size() < kDepartedKept) {
    records_.push_back(record);
    latest = static_cast<uint32_t>(records_.size() - 1);
    return std::nullopt;
  }
  const auto forgotten = std::exchange(records_[next_], record);
  latest = static_cast<uint32_t>(next_);
  next_ = (next_ + 1) % kDepartedKept;
  return forgotten.word;
}

std::optional<Departed::Word> Departed::find(ObjectId id) const {
  if (id.slot >= latest_.size()) {
    return std::nullopt;
  }
  // From later to earlier objects of the place. A record that is none of it, or no earlier one, is
  // another's, who came after.
  auto generation = ~uint64_t{0};
  for (auto at = latest_[id.slot]; at != kNone;) {
    const auto& record = records_[at];
    if (record.id.slot != id.slot || record.id.generation >= generation) {
      return std::nullopt;
    }
    if (record.id == id) {
      return record.word;
    }
    generation = record.id.generation;
    at = record.before;
  }
  return std::nullopt;
}

}  // namespace tenure::store
