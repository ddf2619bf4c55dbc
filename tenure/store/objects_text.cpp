#include <tenure/core/text.h>
#include <tenure/store/objects_state.h>

#include <algorithm>

namespace tenure::store {
namespace {

constexpr size_t kMostNames = 8;

std::string sized_layout_text(const Layout& layout) {
  return text(bytes_text(bytes_of(layout)), " ", layout_text(layout));
}

std::string names_text(const std::vector<Collector>& collectors) {
  std::string out;
  for (size_t i = 0; i < std::min(collectors.size(), kMostNames); ++i) {
    out += text(i == 0 ? "" : ", ", collector_text(collectors[i]));
  }
  if (collectors.size() > kMostNames) {
    out += text(" and ", collectors.size() - kMostNames, " more");
  }
  return out;
}

}  // namespace

std::string Objects::State::object_text(ObjectId id, const Slot& slot) const {
  const auto& line = ledger.at(slot.line);
  return text("object ", id.slot, ".", id.generation, " (",
              sized_layout_text(layouts.at(slot.layout)),
              line.site.empty() ? "" : ", put at " + line.site, ") in ", scope_text(*line.scope));
}

std::string Objects::State::freed_text(Freed reason, uint32_t by, int64_t at_ms,
                                       const std::string& call) const {
  const auto who = member_text(members.at(by));
  const auto when = time_text(at_ms);
  switch (reason) {
    case Freed::fetched:
      return text("was freed at ", when, " when ", who,
                  " had fetched it as the last of its collectors: list everybody who fetches it, "
                  "as often as they do");
    case Freed::closed:
      return text("was freed when ", who, " closed the scope at ", when,
                  ": fetch before the scope closes, or put it in one that lasts longer");
    case Freed::replaced:
      return text("was freed at ", when, " when ", call, " was begun again by ", who,
                  ": use the handles of the later attempt");
    case Freed::failed:
      return text("was freed at ", when, " because ", call, " of ", who,
                  " failed: begin the call again and use its handles");
    case Freed::asked:
      return text("was freed by ", who, " at ", when,
                  ": fetch before it is freed, or put it again");
    case Freed::expired:
      return text("was freed at ", when, " because ", who,
                  ", the last that was waited for, did not come back within its lease of ",
                  limits.lease_ms, " ms: put it again, or give leases more time");
  }
  return "was freed";
}

std::string Objects::State::stale_text(ObjectId id) const {
  const auto owner = member_text(self);
  if (const auto* slot = slots.known(id)) {
    const auto call = text("call ", ledger.at(slot->line).call);
    return text(object_text(id, *slot), " of ", owner, ' ',
                freed_text(slot->reason, slot->by, slot->at_ms, call));
  }
  const auto what = text("object ", id.slot, ".", id.generation);
  if (const auto word = departed.find(id)) {
    return text(what, " of ", owner, ' ',
                freed_text(word->reason, word->by, word->at_ms, "its call"));
  }
  return was_given_out(id)
             ? text(what, " of ", owner, " was freed; the word on who freed it, and when, was ",
                    "dropped, for an owner keeps those of the latest ", kDepartedKept,
                    ", and that many were freed since: fetch handles within the scope that they ",
                    "were put in")
             : text(what, " was never given out by ", owner, ": check where the handle came from");
}

std::string Objects::State::not_yours_text(ObjectId id, const Slot& slot,
                                           const Member& member) const {
  return text(member_text(member), " is no collector of ", object_text(id, slot), " of ",
              member_text(self), ", which was put for ",
              names_text(claims.collectors(slot.claim).listed),
              ": name it as a collector where it is put");
}

}  // namespace tenure::store
