// Ledger: the scopes of an owner and their lines, a line being what one call put at one site. Knows
// which scopes were closed, by whom the latest of them, and keeps the books of the latest of these.
//
// Threading: the holder's lock.
#pragma once

#include <tenure/store/closed_runs.h>
#include <tenure/store/identity.h>
#include <tenure/store/interned.h>
#include <tenure/store/objects.h>
#include <tenure/store/slots.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tenure::store {

inline constexpr size_t kClosedNames = 65'536;  // remembered, with who closed them
inline constexpr size_t kClosedBooks = 4'096;
inline constexpr size_t kClosedLines = 65'536;  // of all of these books

struct ScopeHash {
  size_t operator()(const ScopeName& name) const {
    return mix_hash(std::hash<std::string>()(name.kind), std::hash<std::string>()(name.id));
  }
};
struct MemberHash {
  size_t operator()(const Member& member) const {
    return mix_hash(mix_hash(std::hash<std::string>()(member.role), member.incarnation),
                    static_cast<size_t>(member.rank));
  }
};

struct LedgerLine {
  std::shared_ptr<const ScopeName> scope;  // shared with who speaks of it after its close
  std::string call;
  std::string site;
  Tally tally;  // of what was stored and freed; what is live is counted by walking the slots
  uint32_t first = kNoSlot;  // of its live slots
  uint64_t users = 0;        // its scope, while open, and slots
};

// Names the lines on which stored is not freed + live. Empty if there are none.
std::string difference_of(const std::vector<AccountLine>& lines);

class Ledger {
 public:
  struct Word {
    std::optional<Member> by;  // none: no longer known
    int64_t at_ms = 0;
  };
  // If it was closed: one of the latest kClosedNames, or of the runs of numbers.
  [[nodiscard]] std::optional<Word> closed(const ScopeName& scope) const;
  void count_dropped(const ScopeName& scope);

  // The line, made if it is not there, and its scope with it. REQUIRES: not closed.
  uint32_t line(const ScopeName& scope, const std::string& call, const std::string& site);
  [[nodiscard]] LedgerLine& at(uint32_t line) { return lines_[line]; }
  [[nodiscard]] const LedgerLine& at(uint32_t line) const { return lines_[line]; }
  // A slot speaks of the line, or does no longer.
  void hold(uint32_t line) { ++lines_[line].users; }
  void drop(uint32_t line);

  // Of an open scope. None if it is not known.
  [[nodiscard]] std::vector<uint32_t> lines_of(const ScopeName& scope) const;
  [[nodiscard]] std::vector<uint32_t> lines_of(const ScopeName& scope,
                                               const std::string& call) const;
  // How often the call was begun or failed in that scope.
  [[nodiscard]] uint32_t attempt(const ScopeName& scope, const std::string& call) const;
  void next_attempt(const ScopeName& scope, const std::string& call);

  // Leaves the word and keeps `books`; the lines live on as long as slots speak of them.
  // REQUIRES: no live slots in it.
  void close(const ScopeName& scope, const Member& by, int64_t at_ms, Account books);
  // Of a closed scope, if they are still kept.
  [[nodiscard]] const Account* books(const ScopeName& scope) const;

  [[nodiscard]] std::vector<ScopeName> with_live() const;

 private:
  struct Scope {
    std::shared_ptr<const ScopeName> name;
    std::map<std::pair<std::string, std::string>, uint32_t> lines;  // by call and site
    std::unordered_map<std::string, uint32_t> attempts;
  };
  struct Closed {
    uint32_t by;  // interned
    int64_t at_ms;
  };

  Scope& open(const ScopeName& scope);
  void forget_books();

  std::unordered_map<ScopeName, Scope, ScopeHash> scopes_;
  std::deque<LedgerLine> lines_;
  std::vector<uint32_t> free_lines_;

  // Names by their hash: two of 65,536 meet once in 10^10 runs.
  std::unordered_map<uint64_t, Closed> closed_;
  std::deque<uint64_t> closed_order_;
  ClosedRuns closed_runs_;
  Interned<Member, MemberHash> closers_;

  std::list<Account> books_;  // the latest last
  std::unordered_map<ScopeName, std::list<Account>::iterator, ScopeHash> books_of_;
  size_t book_lines_ = 0;
};

}  // namespace tenure::store
