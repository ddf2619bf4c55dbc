// What is behind Objects: its tables under one mutex, and where contents are made.
//
// Note [Bytes move outside the lock]
// The mutex is held for table work only. Bytes are copied in, spilled and given back to the system
// without it: a put makes its content first and asks for the scope's word again when it enters the
// table; what is freed is moved into a Dead list that is declared before the lock and so ends after
// it.
#pragma once

#include <tenure/store/ages.h>
#include <tenure/store/claims.h>
#include <tenure/store/consumers.h>
#include <tenure/store/departed.h>
#include <tenure/store/interned.h>
#include <tenure/store/ledger.h>
#include <tenure/store/objects.h>
#include <tenure/store/room.h>
#include <tenure/store/slab.h>
#include <tenure/store/slots.h>
#include <tenure/store/source.h>
#include <tenure/store/spill.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tenure::store {

struct LayoutHash {
  size_t operator()(const Layout& layout) const {
    auto hash = static_cast<size_t>(layout.dtype);
    for (const auto size : layout.shape) {
      hash = mix_hash(hash, static_cast<size_t>(size));
    }
    return hash;
  }
};

// What was freed; ends after the lock.
using Dead = std::vector<std::shared_ptr<const Content>>;

struct Objects::State {
  State(Member member, Limits given);

  const Member self;
  const Limits limits;
  const uint32_t generation;  // of the process that made it
  const std::shared_ptr<Room> room;
  const std::shared_ptr<Slabs> slabs;
  const std::unique_ptr<Spill> disk;  // null unless WhenFull::spill

  mutable std::mutex mutex;
  Slots slots;
  Interned<Layout, LayoutHash> layouts;
  Interned<Member, MemberHash> members;  // who freed
  Departed departed;
  Claims claims;
  Ledger ledger;
  Consumers consumers;
  Ages ages;  // filled only if there is a disk to spill to
  // Those of which there is more than one.
  std::unordered_map<const Content*, std::unordered_set<uint32_t>> sharers;
  std::vector<ObjectId> withdrawn;  // for take_withdrawn()
  ObjectsStats counts;              // of what only counts up, and `objects`

  // Throws Error in a forked child.
  void check_process() const;
  [[nodiscard]] int64_t clock() const;

  // --- objects_put.cpp, without the lock ---------------------------------------------------------
  Placed place(const Terms& terms, const Source& source);
  std::shared_ptr<const Content> make_content(const Source& source);
  // Moves the oldest object that can be to disk. False: there is none.
  bool spill_one();

  // --- under the lock
  // ------------------------------------------------------------------------------ Why a put is not
  // stored, if it is not; counts it.
  std::optional<std::string> refusal(const Terms& terms, uint32_t attempt);
  ObjectId enter(const Terms& terms, std::shared_ptr<const Content> content);
  // It is live, or was.
  [[nodiscard]] bool was_given_out(ObjectId id) const;
  // Somebody fetches it right now, or has it mapped.
  [[nodiscard]] bool busy(ObjectId id, const Slot& slot) const;
  void replace_content(uint32_t index, const std::shared_ptr<const Content>& content, Dead& dead);
  void free_slot(uint32_t index, const Member& by, Freed reason, int64_t at_ms, Dead& dead);
  void free_lines(const std::vector<uint32_t>& lines, const Member& by, Freed reason, Dead& dead);

  // --- objects_account.cpp, under the lock
  // ---------------------------------------------------------
  [[nodiscard]] Account account(const ScopeName& scope) const;
  // Of one scope, or of all if it is null.
  [[nodiscard]] std::vector<StillMapped> still_mapped(const ScopeName* scope) const;
  [[nodiscard]] uint64_t mapped_bytes() const;

  // --- objects_text.cpp, under the lock
  // ------------------------------------------------------------ "object 12.3 (64.0 MiB float32
  // [4096, 4096], put at train.py:41) in step 168"
  [[nodiscard]] std::string object_text(ObjectId id, const Slot& slot) const;
  // "was freed by trainer 3 at ...", and what to do.
  [[nodiscard]] std::string freed_text(Freed reason, uint32_t by, int64_t at_ms,
                                       const std::string& call) const;
  [[nodiscard]] std::string stale_text(ObjectId id) const;
  [[nodiscard]] std::string not_yours_text(ObjectId id, const Slot& slot,
                                           const Member& member) const;
};

std::string_view place_name(const Content& content);

}  // namespace tenure::store
