#include <tenure/store/closed_runs.h>

#include <iterator>
#include <optional>
#include <utility>

namespace tenure::store {
namespace {

constexpr size_t kMostDigits = 18;  // of a number that has a successor

bool is_digit(char character) { return character >= '0' && character <= '9'; }

struct Numbered {
  std::string family;
  uint64_t number = 0;
};

// None: it has no number, or one with several spellings.
std::optional<Numbered> numbered(const ScopeName& scope) {
  const auto& id = scope.id;
  size_t end = id.size();
  while (end > 0 && !is_digit(id[end - 1])) {
    --end;
  }
  size_t begin = end;
  while (begin > 0 && is_digit(id[begin - 1])) {
    --begin;
  }
  const auto digits = end - begin;
  if (digits == 0 || digits > kMostDigits || (digits > 1 && id[begin] == '0')) {
    return std::nullopt;
  }
  // Kinds and keys have no control characters.
  Numbered out{.family = scope.kind + '\n' + id.substr(0, begin) + '\n' + id.substr(end)};
  for (size_t i = begin; i < end; ++i) {
    out.number = 10 * out.number + static_cast<uint64_t>(id[i] - '0');
  }
  return out;
}

}  // namespace

bool ClosedRuns::holds(const Family& family, uint64_t number) {
  const auto after = family.upper_bound(number);
  return after != family.begin() && number <= std::prev(after)->second.last;
}

bool ClosedRuns::contains(const ScopeName& scope) const {
  const auto name = numbered(scope);
  if (!name) {
    return false;
  }
  const auto family = families_.find(name->family);
  return family != families_.end() && holds(family->second, name->number);
}

void ClosedRuns::add(const ScopeName& scope) {
  auto name = numbered(scope);
  if (!name) {
    return;
  }
  const auto [place, is_new] = families_.try_emplace(std::move(name->family));
  auto& runs = place->second;
  const auto number = name->number;
  if (holds(runs, number)) {
    return;
  }
  auto last = number;
  if (const auto after = runs.find(number + 1); after != runs.end()) {
    last = after->second.last;
    ages_.erase(after->second.age);
    runs.erase(after);
  }
  const auto after = runs.lower_bound(number);
  if (after != runs.begin() && std::prev(after)->second.last + 1 == number) {
    auto& before = std::prev(after)->second;
    before.last = last;
    ages_.splice(ages_.end(), ages_, before.age);
    return;
  }
  ages_.push_back({.family = &place->first, .first = number});
  runs[number] = {.last = last, .age = std::prev(ages_.end())};
  if (ages_.size() > kClosedRuns) {
    forget_oldest();
  }
}

void ClosedRuns::forget_oldest() {
  const auto oldest = ages_.front();
  ages_.pop_front();
  const auto family = families_.find(*oldest.family);
  family->second.erase(oldest.first);
  if (family->second.empty()) {
    families_.erase(family);
  }
}

}  // namespace tenure::store
