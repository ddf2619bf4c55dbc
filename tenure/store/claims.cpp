#include <tenure/store/claims.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <algorithm>
#include <array>

namespace tenure::store {
namespace {

constexpr size_t kWordBits = 64;

// Equal for equal sets only.
std::string name_of(const Collectors& collectors) {
  std::string name(1, static_cast<char>(collectors.kind));
  const auto append = [&](const auto& value) {
    name.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  append(collectors.count);
  for (const auto& collector : collectors.listed) {
    append(static_cast<uint32_t>(collector.role.size()));
    name += collector.role;
    append(collector.rank ? int64_t{*collector.rank} : int64_t{-1});
  }
  return name;
}

}  // namespace

void check_collectors(const Collectors& collectors) {
  if (collectors.listed.size() > kMostCollectors) {
    throw InputError(text(collectors.listed.size(), " collectors are more than ", kMostCollectors,
                          ": name a role at any rank, or give a count"));
  }
  for (const auto& collector : collectors.listed) {
    if (collector.rank && *collector.rank < 0) {
      throw InputError(text("a collector of rank ", *collector.rank,
                            ": ranks begin at 0; leave the rank out for any"));
    }
    if (!collector.role.empty()) {
      check_member({collector.role, 0, 1});
    }
  }
}

Claims::Claim Claims::take(const Collectors& collectors) {
  auto [entry, is_new] = numbers_.try_emplace(name_of(collectors), 0, collectors);
  if (is_new) {
    if (free_sets_.empty()) {
      free_sets_.push_back(static_cast<uint32_t>(sets_.size()));
      sets_.emplace_back();
    }
    entry->second.first = free_sets_.back();
    free_sets_.pop_back();
    auto& set = sets_[entry->second.first];
    set = {&entry->second.second, &entry->first, 0, {}};
    for (uint32_t place = 0; place < collectors.listed.size(); ++place) {
      const auto& collector = collectors.listed[place];
      set.places[{collector.role, collector.rank}].push_back(place);
    }
  }
  const auto number = entry->second.first;
  auto& set = sets_[number];
  ++set.users;
  if (collectors.kind != Collectors::Kind::listed) {
    return {number, collectors.count};
  }
  const auto size = collectors.listed.size();
  if (!wide(set)) {
    return {number, size == kWordBits ? ~uint64_t{0} : (uint64_t{1} << size) - 1};
  }
  if (free_rows_.empty()) {
    free_rows_.push_back(static_cast<uint32_t>(rows_.size()));
    rows_.emplace_back();
  }
  const auto row = free_rows_.back();
  free_rows_.pop_back();
  rows_[row].assign((size + kWordBits - 1) / kWordBits, ~uint64_t{0});
  if (size % kWordBits != 0) {
    rows_[row].back() = (uint64_t{1} << (size % kWordBits)) - 1;
  }
  return {number, row};
}

void Claims::drop(uint32_t set, uint64_t pending) {
  auto& entry = sets_[set];
  if (wide(entry)) {
    rows_[pending] = {};
    free_rows_.push_back(static_cast<uint32_t>(pending));
  }
  if (--entry.users == 0) {
    numbers_.erase(numbers_.find(*entry.name));
    entry = {};
    free_sets_.push_back(set);
  }
}

bool Claims::may_fetch(uint32_t set, const Member& member) const {
  const auto& entry = sets_[set];
  if (entry.collectors->kind != Collectors::Kind::listed) {
    return true;
  }
  return places(entry, {member.role, member.rank}) != nullptr ||
         places(entry, {member.role, std::nullopt}) != nullptr ||
         places(entry, {"", member.rank}) != nullptr ||
         places(entry, {"", std::nullopt}) != nullptr;
}

bool Claims::fill(uint32_t set, uint64_t& pending, const Member& member) {
  const auto& entry = sets_[set];
  if (entry.collectors->kind == Collectors::Kind::anyone) {
    return false;
  }
  if (entry.collectors->kind == Collectors::Kind::counted) {
    pending -= pending == 0 ? 0 : 1;
    return pending == 0;
  }
  const std::array<Key, 4> keys{Key{member.role, member.rank}, Key{member.role, std::nullopt},
                                Key{"", member.rank}, Key{"", std::nullopt}};
  // Note [Which collector a fetch fills]
  for (const auto& key : keys) {
    const auto* fitting = places(entry, key);
    if (fitting == nullptr) {
      continue;
    }
    const auto open = std::find_if(fitting->begin(), fitting->end(), [&](uint32_t place) {
      return is_pending(entry, pending, place);
    });
    if (open != fitting->end()) {
      clear(entry, pending, *open);
      break;
    }
    if (&key == keys.data()) {
      break;
    }
  }
  return done(set, pending);
}

uint32_t Claims::lapse(uint32_t set, uint64_t& pending, const Member& member, OfItsRank is) {
  const auto& entry = sets_[set];
  if (entry.collectors->kind != Collectors::Kind::listed) {
    return 0;
  }
  uint32_t lapsed = 0;
  const auto lapse_at = [&](const Key& key) {
    const auto* const fitting = places(entry, key);
    if (fitting == nullptr) {
      return;
    }
    for (const auto place : *fitting) {
      if (is_pending(entry, pending, place)) {
        clear(entry, pending, place);
        ++lapsed;
      }
    }
  };
  lapse_at({member.role, member.rank});
  if (is == OfItsRank::alone) {
    lapse_at({"", member.rank});
  }
  return lapsed;
}

bool Claims::give_up(uint32_t set, uint64_t& pending, const Member& member) {
  const auto& entry = sets_[set];
  const bool is_listed = entry.collectors->kind == Collectors::Kind::listed;
  if (done(set, pending) || entry.collectors->kind == Collectors::Kind::anyone ||
      (is_listed && places(entry, {member.role, member.rank}) != nullptr)) {
    return false;
  }
  fill(set, pending, member);
  return true;
}

bool Claims::done(uint32_t set, uint64_t pending) const {
  const auto& entry = sets_[set];
  if (entry.collectors->kind == Collectors::Kind::anyone) {
    return false;
  }
  if (!wide(entry)) {
    return pending == 0;
  }
  return std::ranges::all_of(rows_[pending], [](uint64_t word) { return word == 0; });
}

std::vector<std::string> Claims::waiting(uint32_t set, uint64_t pending, const Gone& gone) const {
  const auto& entry = sets_[set];
  const auto after = [&](std::string who, const std::string& role) {
    if (const auto last = gone(role)) {
      who += text(" (", member_text(*last), ", the last one here, did not come back)");
    }
    return who;
  };
  switch (entry.collectors->kind) {
    case Collectors::Kind::anyone:
      return {};
    case Collectors::Kind::counted:
      return {after(pending == 1 ? "1 fetch by anyone" : text(pending, " fetches by anyone"), "")};
    case Collectors::Kind::listed:
      break;
  }
  std::vector<std::string> out;
  for (uint32_t place = 0; place < entry.collectors->listed.size(); ++place) {
    if (is_pending(entry, pending, place)) {
      const auto& collector = entry.collectors->listed[place];
      const auto who = collector_text(collector);
      out.push_back(collector.rank ? who : after(who, collector.role));
    }
  }
  return out;
}

const std::vector<uint32_t>* Claims::places(const Set& set, const Key& key) const {
  const auto found = set.places.find(key);
  return found == set.places.end() ? nullptr : &found->second;
}

bool Claims::wide(const Set& set) const {
  return set.collectors->kind == Collectors::Kind::listed &&
         set.collectors->listed.size() > kWordBits;
}

bool Claims::is_pending(const Set& set, uint64_t pending, uint32_t place) const {
  const auto word = wide(set) ? rows_[pending][place / kWordBits] : pending;
  return (word >> (place % kWordBits) & 1) != 0;
}

void Claims::clear(const Set& set, uint64_t& pending, uint32_t place) {
  auto& word = wide(set) ? rows_[pending][place / kWordBits] : pending;
  word &= ~(uint64_t{1} << (place % kWordBits));
}

}  // namespace tenure::store
