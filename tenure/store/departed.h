// Departed: who freed the objects whose places others have now, when and why: of the latest
// kDepartedKept of them, in 32 bytes each. Threading: the holder's lock.
#pragma once

#include <tenure/store/identity.h>
#include <tenure/store/objects.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace tenure::store {

inline constexpr size_t kDepartedKept = 65'536;

class Departed {
 public:
  struct Word {
    uint32_t by = 0;  // the holder's number for the member
    Freed reason = Freed::asked;
    int64_t at_ms = 0;
  };

  // The word on an object that leaves its place, later ones of a place after earlier ones. Returns
  // the word that is forgotten for it.
  std::optional<Word> add(ObjectId id, const Word& word);
  [[nodiscard]] std::optional<Word> find(ObjectId id) const;

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  struct Record {
    ObjectId id;
    uint32_t before = kNone;  // the record of the object that had the place before, if still there
    Word word;
  };
  static_assert(sizeof(Record) == 32);

  std::vector<Record> records_;   // a ring, once it is full
  size_t next_ = 0;               // in it
  std::vector<uint32_t> latest_;  // record of each place
};

}  // namespace tenure::store
