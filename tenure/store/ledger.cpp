#include <tenure/store/ledger.h>

#include <tenure/core/text.h>

#include <utility>

namespace tenure::store {
namespace {

uint64_t freed_in_all(const uint64_t (&freed)[kFreedReasons]) {
  uint64_t all = 0;
  for (const auto count : freed) {
    all += count;
  }
  return all;
}

}  // namespace

std::string difference_of(const std::vector<AccountLine>& lines) {
  std::string out;
  for (const auto& line : lines) {
    const auto& tally = line.tally;
    const auto freed = freed_in_all(tally.freed);
    const auto freed_bytes = freed_in_all(tally.freed_bytes);
    if (tally.stored == freed + tally.live &&
        tally.stored_bytes == freed_bytes + tally.live_bytes) {
      continue;
    }
    out += text(out.empty() ? "" : "; ", line.call.empty() ? "no call" : "call " + line.call,
                " at ", line.site.empty() ? "an unknown site" : line.site, ": stored ",
                tally.stored, " (", tally.stored_bytes, " B), freed ", freed, " (", freed_bytes,
                " B), live ", tally.live, " (", tally.live_bytes, " B)");
  }
  return out;
}

std::optional<Ledger::Word> Ledger::closed(const ScopeName& scope) const {
  const auto found = closed_.find(ScopeHash()(scope));
  if (found == closed_.end()) {
    return closed_runs_.contains(scope) ? std::optional<Word>(Word{}) : std::nullopt;
  }
  return Word{closers_.at(found->second.by), found->second.at_ms};
}

void Ledger::count_dropped(const ScopeName& scope) {
  if (const auto found = books_of_.find(scope); found != books_of_.end()) {
    ++found->second->dropped;
  }
}

Ledger::Scope& Ledger::open(const ScopeName& scope) {
  auto& entry = scopes_[scope];
  if (!entry.name) {
    entry.name = std::make_shared<const ScopeName>(scope);
  }
  return entry;
}

uint32_t Ledger::line(const ScopeName& scope, const std::string& call, const std::string& site) {
  auto& owner = open(scope);
  const auto [place, is_new] = owner.lines.try_emplace({call, site}, 0);
  if (is_new) {
    if (free_lines_.empty()) {
      free_lines_.push_back(static_cast<uint32_t>(lines_.size()));
      lines_.emplace_back();
    }
    place->second = free_lines_.back();
    free_lines_.pop_back();
    lines_[place->second] = {owner.name, call, site, {}, kNoSlot, 1};
  }
  return place->second;
}

void Ledger::drop(uint32_t line) {
  if (--lines_[line].users == 0) {
    lines_[line] = {};
    free_lines_.push_back(line);
  }
}

std::vector<uint32_t> Ledger::lines_of(const ScopeName& scope) const {
  std::vector<uint32_t> out;
  if (const auto found = scopes_.find(scope); found != scopes_.end()) {
    for (const auto& [key, line] : found->second.lines) {
      out.push_back(line);
    }
  }
  return out;
}

std::vector<uint32_t> Ledger::lines_of(const ScopeName& scope, const std::string& call) const {
  std::vector<uint32_t> out;
  if (const auto found = scopes_.find(scope); found != scopes_.end()) {
    const auto& lines = found->second.lines;
    for (auto line = lines.lower_bound({call, ""});
         line != lines.end() && line->first.first == call; ++line) {
      out.push_back(line->second);
    }
  }
  return out;
}

uint32_t Ledger::attempt(const ScopeName& scope, const std::string& call) const {
  const auto found = scopes_.find(scope);
  if (found == scopes_.end()) {
    return 0;
  }
  const auto attempt = found->second.attempts.find(call);
  return attempt == found->second.attempts.end() ? 0 : attempt->second;
}

void Ledger::next_attempt(const ScopeName& scope, const std::string& call) {
  ++open(scope).attempts[call];
}

void Ledger::close(const ScopeName& scope, const Member& by, int64_t at_ms, Account books) {
  if (const auto found = scopes_.find(scope); found != scopes_.end()) {
    for (const auto& [key, line] : found->second.lines) {
      drop(line);
    }
    scopes_.erase(found);
  }
  const auto hash = static_cast<uint64_t>(ScopeHash()(scope));
  if (closed_.contains(hash)) {
    return;  // the first word stands, and so do its books
  }
  closed_runs_.add(scope);
  closed_[hash] = {closers_.take(by), at_ms};
  closed_order_.push_back(hash);
  if (closed_order_.size() > kClosedNames) {
    const auto oldest = closed_.find(closed_order_.front());
    closers_.drop(oldest->second.by);
    closed_.erase(oldest);
    closed_order_.pop_front();
  }
  book_lines_ += books.lines.size();
  books_.push_back(std::move(books));
  books_of_[scope] = std::prev(books_.end());
  forget_books();
}

void Ledger::forget_books() {
  while (books_.size() > 1 && (books_.size() > kClosedBooks || book_lines_ > kClosedLines)) {
    const auto& oldest = books_.front();
    book_lines_ -= oldest.lines.size();
    books_of_.erase(oldest.scope);
    books_.pop_front();
  }
}

const Account* Ledger::books(const ScopeName& scope) const {
  const auto found = books_of_.find(scope);
  return found == books_of_.end() ? nullptr : &*found->second;
}

std::vector<ScopeName> Ledger::with_live() const {
  std::vector<ScopeName> out;
  for (const auto& [name, scope] : scopes_) {
    for (const auto& [key, line] : scope.lines) {
      if (lines_[line].first != kNoSlot) {
        out.push_back(name);
        break;
      }
    }
  }
  return out;
}

}  // namespace tenure::store
