// Objects: what this process owns for others to fetch. Who may fetch each object is said when it is
// put; a scope owns it; it goes after the last expected fetch, or when the scope closes, whichever
// comes first. What was freed leaves a word behind on who freed it and when.
//
// Torch-free: bytes come in, bytes go out. Threading: every method from any thread; none takes the
// GIL, blocks on another process, or calls out (but put() to its fill function, without a lock).
// In a forked child an inherited Objects is of no use: put() and fetch() throw, and its end leaves
// what it has alone.
#pragma once

#include <tenure/store/collectors.h>
#include <tenure/store/content.h>
#include <tenure/store/identity.h>
#include <tenure/store/layout.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tenure::store {

// What to do when the cap, the control group or the machine has no room for another object.
enum class WhenFull : uint8_t { refuse, spill };

struct Limits {
  // Bytes in memory; 0: what the control group and the machine have free. What was freed and is
  // still mapped by a consumer is not under the cap, but the group and the machine feel it.
  uint64_t cap = 0;
  WhenFull when_full = WhenFull::refuse;
  std::string spill_folder;         // empty: TMPDIR or /tmp
  uint64_t small_bytes = 64 << 10;  // objects up to this lie in slabs and are copied inline
  // How long a consumer that parted, or that does not renew, keeps what it may still fetch.
  int64_t lease_ms = 30'000;
  // Milliseconds of a clock that never goes back, for leases. None: the system's. It is asked under
  // a lock.
  std::function<int64_t()> clock;
};

// How an object is put.
struct Terms {
  ScopeName scope;
  std::string call;  // empty: none. A later begin_call() of the same name replaces what it put
  // Of the call, as begin_call() gave it; none: the latest.
  std::optional<uint32_t> attempt{};  // NOLINT(readability-redundant-member-init): may be left out
  Collectors collectors;
  Layout layout;
  std::string site;  // "train.py:41"
};

// Why put_again() stored nothing, if the object was no longer live.
inline constexpr std::string_view kGone = "gone";

// What put() gave: the id, or why nothing is stored.
struct Placed {
  ObjectId id;
  std::string unstored;  // "nobody collects it", "step 168 was closed by controller 0 at ..."
};

// A process that fetches, for as long as its connection lasts; the same member that comes again
// within its lease is the same consumer.
enum class ConsumerId : uint64_t {};

// What a fetch gives. The content lives as long as this does, whatever is freed meanwhile.
struct Fetched {
  Layout layout;  // of the part asked for
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::shared_ptr<const Content> content;  // shared with the table, and with other fetches
};

// Why objects were freed.
enum class Freed : uint8_t { fetched, closed, replaced, failed, asked, expired };
inline constexpr size_t kFreedReasons = 6;
std::string_view freed_name(Freed reason);

// Stored = freed + live, in objects and bytes, of a scope or of one line of it.
struct Tally {
  uint64_t stored = 0;
  uint64_t stored_bytes = 0;
  uint64_t freed[kFreedReasons] = {};
  uint64_t freed_bytes[kFreedReasons] = {};
  uint64_t live = 0;
  uint64_t live_bytes = 0;
};

struct AccountLine {
  std::string call;
  std::string site;
  Tally tally;
};

// A consumer that still has a freed object mapped.
struct StillMapped {
  Member by;
  int64_t since_ms = 0;
  uint64_t objects = 0;
  uint64_t bytes = 0;
};

// The books of a scope, from the table itself and not from the counters: `difference` is empty if
// stored = freed + live on every line, and otherwise names the lines where it is not.
struct Account {
  ScopeName scope;
  Tally total;
  std::vector<AccountLine> lines;
  std::vector<StillMapped> still_mapped;
  uint64_t dropped = 0;  // puts that came after the close
  std::string difference;
};

struct ObjectsStats {
  uint64_t objects = 0;        // live handles
  uint64_t bytes = 0;          // in memory, shared contents once: what the OS would get back
  uint64_t spilled_bytes = 0;  // on disk
  uint64_t mapped_bytes = 0;   // freed here, and still mapped by consumers
  uint64_t put_objects = 0;    // since the start
  uint64_t put_bytes = 0;
  uint64_t unstored = 0;  // puts that stored nothing
  uint64_t fetches = 0;
  uint64_t fetched_bytes = 0;
  uint64_t dropped = 0;      // puts that came after a close
  uint64_t stale = 0;        // fetches of what was gone
  uint64_t expired = 0;      // claims that lapsed
  uint64_t differences = 0;  // closes whose books did not balance
  uint64_t scopes = 0;       // open ones with objects
  uint64_t consumers = 0;
};

// A live object, as `tenure store ls` shows it.
struct Listed {
  ObjectId id;
  ScopeName scope;
  std::string call;
  std::string site;
  Layout layout;
  uint64_t bytes = 0;
  std::string place;                 // "memfd", "slab", "disk"
  std::vector<std::string> waiting;  // the collectors that have not fetched: "trainer 3"
  int64_t put_ms = 0;
};

class Objects {
 public:
  explicit Objects(Member self, Limits limits = {});
  Objects(const Objects&) = delete;
  Objects& operator=(const Objects&) = delete;
  Objects(Objects&&) = delete;
  Objects& operator=(Objects&&) = delete;
  ~Objects();

  // --- owner's side ---------------------------------------------------------------------------

  // Copies `bytes`, which are contiguous, in. Throws BudgetError when there is no room (says how
  // much there is and what to do), InputError for bytes that are not of the layout's number.
  Placed put(const Terms& terms, std::span<const std::byte> bytes);
  // The same for bytes that come in pieces: `fill(offset, piece)` is called for pieces in order
  // until all is filled; each piece is at most `piece_bytes`. What it throws passes through, and
  // nothing is stored.
  Placed put(const Terms& terms, uint64_t piece_bytes,
             const std::function<void(uint64_t offset, std::span<std::byte> piece)>& fill);
  // Another handle on the content of a live object, which counts once. No longer live: nothing is
  // stored, `unstored` is kGone.
  Placed put_again(const Terms& terms, ObjectId of);

  // The bytes of a live object. Null if it is none.
  [[nodiscard]] std::shared_ptr<const Content> content(ObjectId id) const;
  // The same of one that anyone may fetch until its scope closes. Null of any other: it may go with
  // a fetch that is being told.
  [[nodiscard]] std::shared_ptr<const Content> open_content(ObjectId id) const;

  // A call is about to put: what an earlier attempt of that name put in that scope is freed, and
  // what it still puts is not stored. Returns the attempt.
  uint32_t begin_call(const ScopeName& scope, const std::string& call);
  // The call failed: what it put is freed, unless a later attempt has begun. No attempt: the
  // latest.
  void fail_call(const ScopeName& scope, const std::string& call,
                 std::optional<uint32_t> attempt = {});

  // Frees all that the scope owns, and drops what is put in it later. `by` is who asked. A scope
  // that was closed before, or that never had an object, is no error: it leaves its word, too.
  Account close(const ScopeName& scope, const Member& by);
  // The books of a scope, open or (the latest 4,096) closed.
  [[nodiscard]] Account account(const ScopeName& scope) const;
  // Frees one object, if it is live. Returns whether it was.
  bool free(ObjectId id, const Member& by, Freed reason = Freed::asked);

  // What was freed before its scope closed, by name (also if it had gone with its last fetch) or
  // with its call, since this was asked last: for who tells consumers, which may keep what they
  // fetched of it. Nothing while there are none.
  [[nodiscard]] std::vector<ObjectId> take_withdrawn();

  // --- consumers' side ------------------------------------------------------------------------

  ConsumerId admit(const Member& member);
  // Its connection ended: what it had mapped is unmapped or will never be told of; what it may
  // still fetch lapses after the lease, unless it is admitted again.
  void parted(ConsumerId consumer);
  void renew(ConsumerId consumer);
  // Drops the claims of those whose lease is over. Returns how many consumers lapsed.
  size_t expire();

  // Throws StaleHandle (who freed it, when, why), AccessRefused (not a collector; names who is),
  // InputError (rows).
  Fetched fetch(ConsumerId consumer, ObjectId id, Rows rows);
  // The consumer has it: its expected fetch is done, and if it was the last one the object goes.
  // Of something freed meanwhile: no error.
  void fetched(ConsumerId consumer, ObjectId id);
  // A descriptor was passed: the consumer has it mapped until it says otherwise or parts. Several
  // mappings of one object by one consumer are counted.
  void mapped(ConsumerId consumer, ObjectId id);
  void unmapped(ConsumerId consumer, ObjectId id);

  // --- what there is --------------------------------------------------------------------------

  [[nodiscard]] ObjectsStats stats() const;
  // At most `most`, from `from` on in order of slots; `next` is where to go on, or none left: 0.
  [[nodiscard]] std::vector<Listed> list(uint32_t from, size_t most, uint32_t* next) const;
  [[nodiscard]] std::vector<StillMapped> still_mapped() const;
  // All scopes that have live objects.
  [[nodiscard]] std::vector<ScopeName> scopes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tenure::store
