// Slots: the table of objects, one cache line each, in chunks that never move. A freed slot keeps
// the word on who freed it until it is used again, and the one that was freed first is used first:
// at least the latest kWordsKept freed objects can say what became of them.
//
// Threading: the holder's lock.
#pragma once

#include <tenure/store/content.h>
#include <tenure/store/identity.h>
#include <tenure/store/objects.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tenure::store {

inline constexpr uint32_t kNoSlot = ~uint32_t{0};
inline constexpr uint32_t kWordsKept = 4096;

struct Slot {
  enum class State : uint8_t { unused, live, freed };

  std::shared_ptr<const Content> content;  // live ones only
  uint64_t pending = 0;                    // of Claims; live ones only
  int64_t at_ms = 0;                       // when it was put; of a freed one, when it was freed
  uint32_t generation = 0;
  uint32_t line = 0;    // of Ledger
  uint32_t layout = 0;  // interned
  uint32_t claim = 0;   // the set of Claims; live ones only
  uint32_t by = 0;      // interned member; freed ones only
  // In the list of the line's live slots, or `next` in that of the freed ones.
  uint32_t next = kNoSlot;
  uint32_t before = kNoSlot;
  State state = State::unused;
  Freed reason = Freed::asked;
  uint8_t shared = 0;  // there are other handles on the content
  uint8_t mapped = 0;  // a consumer had it mapped once
};
static_assert(sizeof(Slot) == 64);

class Slots {
 public:
  // `first` is the first generation of every slot.
  explicit Slots(uint32_t first = 1) : first_(first) {}

  // A slot that is not live, with its new generation. Its state is `freed` if it still carries the
  // word on its former object, which the caller clears.
  uint32_t take();
  // The live slot becomes a freed one. REQUIRES: its words are in it.
  void give_back(uint32_t index);

  [[nodiscard]] Slot& at(uint32_t index) { return chunks_[index / kChunk]->slots[index % kChunk]; }
  [[nodiscard]] const Slot& at(uint32_t index) const {
    return chunks_[index / kChunk]->slots[index % kChunk];
  }
  // Null unless that very object is live, or is live or was the last one in its place.
  [[nodiscard]] Slot* live(ObjectId id);
  [[nodiscard]] const Slot* live(ObjectId id) const;
  [[nodiscard]] const Slot* known(ObjectId id) const;

  [[nodiscard]] uint32_t end() const { return end_; }
  // The first live slot from `from` on, or end().
  [[nodiscard]] uint32_t next_live(uint32_t from) const;

 private:
  static constexpr uint32_t kChunk = 4096;
  struct Chunk {
    std::array<Slot, kChunk> slots;
    uint32_t live = 0;
  };

  uint32_t first_;
  uint32_t end_ = 0;
  uint32_t first_free_ = kNoSlot;
  uint32_t last_free_ = kNoSlot;
  uint32_t free_ = 0;
  std::vector<std::unique_ptr<Chunk>> chunks_;
};

}  // namespace tenure::store
