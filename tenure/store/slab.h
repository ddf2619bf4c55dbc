// Slabs: small contents side by side in anonymous memory, by size class: a million of them cannot
// have a descriptor each. A slab whose last piece is let go goes back to the system at once. What
// is charged is what the system would get back: the pages of a slab that were ever filled.
//
// Torch-free. Threading: any thread. Lives as long as a piece of it does.
#pragma once

#include <tenure/store/content.h>
#include <tenure/store/room.h>
#include <tenure/store/source.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace tenure::store {

// The size of the pieces in which `bytes` lie: at most a sixteenth, or 63, more.
uint64_t piece_bytes(uint64_t bytes);

inline constexpr uint64_t kMostSlabBytes = uint64_t{1} << 20;  // of a piece

class Slab;

// A place in a slab that is the holder's until it ends. Move-only. 16 bytes: there is one for each
// small object.
class Piece {
 public:
  Piece(Piece&& other) noexcept;
  Piece& operator=(Piece&&) = delete;
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;
  ~Piece();

  [[nodiscard]] std::byte* data() const;
  [[nodiscard]] uint64_t bytes() const { return bytes_; }

 private:
  friend class Slabs;
  Piece(Slab* slab, uint32_t index, uint32_t bytes) : slab_(slab), index_(index), bytes_(bytes) {}

  Slab* slab_;
  uint32_t index_;
  uint32_t bytes_;
};

class Slabs : public std::enable_shared_from_this<Slabs> {
 public:
  static std::shared_ptr<Slabs> make(std::shared_ptr<Room> room);
  Slabs(const Slabs&) = delete;
  Slabs& operator=(const Slabs&) = delete;
  Slabs(Slabs&&) = delete;
  Slabs& operator=(Slabs&&) = delete;
  ~Slabs();

  // Room for `bytes`, at most kMostSlabBytes. None, and `lack` says why.
  std::optional<Piece> take(uint64_t bytes, std::string& lack);

 private:
  friend class Piece;
  struct State;
  explicit Slabs(std::shared_ptr<Room> room);
  void give_back(Slab* slab, uint32_t index);

  std::unique_ptr<State> state_;
};

// Fills the piece. What the source throws passes through.
std::shared_ptr<const Content> make_slab_content(const Source& source, Piece piece);

// A content of any size in anonymous memory of its own: for when there is no descriptor left.
std::shared_ptr<const Content> make_lone_slab(const Source& source, Charge charge);

}  // namespace tenure::store
