#include <tenure/store/objects_state.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace tenure::store {
namespace {

void add_to(Tally& total, const Tally& line) {
  total.stored += line.stored;
  total.stored_bytes += line.stored_bytes;
  for (size_t reason = 0; reason < kFreedReasons; ++reason) {
    total.freed[reason] += line.freed[reason];
    total.freed_bytes[reason] += line.freed_bytes[reason];
  }
  total.live += line.live;
  total.live_bytes += line.live_bytes;
}

}  // namespace

Account Objects::State::account(const ScopeName& scope) const {
  if (const auto* books = ledger.books(scope)) {
    auto out = *books;
    out.still_mapped = still_mapped(&scope);
    return out;
  }
  Account out;
  out.scope = scope;
  const auto lines = ledger.lines_of(scope);
  std::unordered_map<uint32_t, size_t> places;
  for (const auto line : lines) {
    const auto& entry = ledger.at(line);
    places[line] = out.lines.size();
    out.lines.push_back({entry.call, entry.site, entry.tally});
  }
  // Every live slot of the table is looked at, not the lists of the lines: a slot that is on none
  // shows here.
  for (auto index = lines.empty() ? slots.end() : slots.next_live(0); index != slots.end();
       index = slots.next_live(index + 1)) {
    const auto& slot = slots.at(index);
    if (const auto place = places.find(slot.line); place != places.end()) {
      ++out.lines[place->second].tally.live;
      out.lines[place->second].tally.live_bytes += slot.content->bytes();
    }
  }
  for (const auto& line : out.lines) {
    add_to(out.total, line.tally);
  }
  out.still_mapped = still_mapped(&scope);
  out.difference = difference_of(out.lines);
  return out;
}

std::vector<StillMapped> Objects::State::still_mapped(const ScopeName* scope) const {
  std::vector<StillMapped> out;
  for (const auto& [number, consumer] : consumers.all()) {
    StillMapped entry{consumer.member, 0, 0, 0};
    for (const auto& [id, object] : consumer.mapped) {
      if (slots.live(id) != nullptr || (scope != nullptr && *object.scope != *scope)) {
        continue;
      }
      entry.since_ms =
          entry.objects == 0 ? object.since_ms : std::min(entry.since_ms, object.since_ms);
      ++entry.objects;
      entry.bytes += object.bytes;
    }
    if (entry.objects != 0) {
      out.push_back(std::move(entry));
    }
  }
  std::ranges::sort(out, [](const StillMapped& a, const StillMapped& b) {
    return std::tie(a.by.role, a.by.rank, a.since_ms) < std::tie(b.by.role, b.by.rank, b.since_ms);
  });
  return out;
}

uint64_t Objects::State::mapped_bytes() const {
  // Consumers that map one content share its pages, and so do handles that share it. One that was
  // freed before it was said to be mapped has no content to compare.
  std::set<std::weak_ptr<const Content>, std::owner_less<>> seen;
  uint64_t bytes = 0;
  for (const auto& [number, consumer] : consumers.all()) {
    for (const auto& [id, object] : consumer.mapped) {
      if (slots.live(id) != nullptr || !object.content.expired()) {
        continue;
      }
      const bool unknown = !object.content.owner_before(std::weak_ptr<const Content>()) &&
                           !std::weak_ptr<const Content>().owner_before(object.content);
      if (unknown || seen.insert(object.content).second) {
        bytes += object.bytes;
      }
    }
  }
  return bytes;
}

Account Objects::account(const ScopeName& scope) const {
  state_->check_process();
  std::lock_guard lock(state_->mutex);
  return state_->account(scope);
}

ObjectsStats Objects::stats() const {
  state_->check_process();
  std::lock_guard lock(state_->mutex);
  auto out = state_->counts;
  out.bytes = state_->room->held();
  out.spilled_bytes = state_->disk ? state_->disk->bytes() : 0;
  out.mapped_bytes = state_->mapped_bytes();
  out.scopes = state_->ledger.with_live().size();
  out.consumers = state_->consumers.all().size();
  return out;
}

std::vector<Listed> Objects::list(uint32_t from, size_t most, uint32_t* next) const {
  state_->check_process();
  const auto& state = *state_;
  std::vector<Listed> out;
  std::lock_guard lock(state.mutex);
  const auto gone = [&](const std::string& role) { return state.consumers.gone(role); };
  auto index = state.slots.next_live(from);
  for (; index != state.slots.end() && out.size() < most;
       index = state.slots.next_live(index + 1)) {
    const auto& slot = state.slots.at(index);
    const auto& line = state.ledger.at(slot.line);
    out.push_back({{index, slot.generation},
                   *line.scope,
                   line.call,
                   line.site,
                   state.layouts.at(slot.layout),
                   slot.content->bytes(),
                   std::string(place_name(*slot.content)),
                   state.claims.waiting(slot.claim, slot.pending, gone),
                   slot.at_ms});
  }
  if (next != nullptr) {
    *next = index == state.slots.end() ? 0 : index;
  }
  return out;
}

std::vector<StillMapped> Objects::still_mapped() const {
  state_->check_process();
  std::lock_guard lock(state_->mutex);
  return state_->still_mapped(nullptr);
}

std::vector<ScopeName> Objects::scopes() const {
  state_->check_process();
  std::lock_guard lock(state_->mutex);
  return state_->ledger.with_live();
}

}  // namespace tenure::store
