#include <tenure/store/slab.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/segment.h>

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

namespace tenure::store {
namespace {

constexpr uint64_t kSlabBytes = uint64_t{1} << 20;
constexpr uint64_t kLeastPieces = 4;  // of a slab with large pieces

// Anonymous memory that is given back when it ends.
class Pages {
 public:
  explicit Pages(uint64_t bytes)
      : bytes_(bytes),
        data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (data_ == MAP_FAILED) {
      throw BudgetError(text("the kernel refused ", bytes_text(bytes), " of memory (",
                             std::generic_category().message(errno),
                             "); free or fetch other objects first"));
    }
    // A huge page would be filled whole by its first byte, and bytes would not be what they seem.
    ::madvise(data_, bytes, MADV_NOHUGEPAGE);
    // A forked child would keep what its parent frees, and has no use for it.
    ::madvise(data_, bytes, MADV_DONTFORK);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  Pages(Pages&&) = delete;
  Pages& operator=(Pages&&) = delete;
  ~Pages() { ::munmap(data_, bytes_); }

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  uint64_t bytes_;
  void* data_;
};

void copy_out(std::span<const std::byte> memory, uint64_t offset, std::span<std::byte> to) {
  if (offset > memory.size() || to.size() > memory.size() - offset) {
    throw Error(text("bytes ", offset, " to ", offset + to.size(), " of an object of ",
                     memory.size(), " were asked for"));
  }
  if (!to.empty()) {
    std::memcpy(to.data(), memory.data() + offset, to.size());
  }
}

class SlabContent final : public Content {
 public:
  explicit SlabContent(Piece piece) : piece_(std::move(piece)) {}

  [[nodiscard]] uint64_t bytes() const override { return piece_.bytes(); }
  [[nodiscard]] std::span<const std::byte> memory() const override {
    return {piece_.data(), piece_.bytes()};
  }
  void read(uint64_t offset, std::span<std::byte> to) const override {
    copy_out(memory(), offset, to);
  }

 private:
  Piece piece_;
};

class LoneSlab final : public Content {
 public:
  LoneSlab(const Source& source, Charge charge)
      : bytes_(source.bytes()), charge_(std::move(charge)), pages_(segment_bytes(source.bytes())) {
    source.copy_to(pages_.data());
    charge_.settle();
  }

  [[nodiscard]] uint64_t bytes() const override { return bytes_; }
  [[nodiscard]] std::span<const std::byte> memory() const override {
    return {pages_.data(), bytes_};
  }
  void read(uint64_t offset, std::span<std::byte> to) const override {
    copy_out(memory(), offset, to);
  }

 private:
  uint64_t bytes_;
  Charge charge_;  // given back after the pages
  Pages pages_;
};

}  // namespace

uint64_t piece_bytes(uint64_t bytes) {
  // Sixteen classes to each doubling, none closer than 64 bytes.
  const uint64_t step = std::max<uint64_t>(64, std::bit_floor(std::max<uint64_t>(bytes, 1)) / 16);
  return std::max<uint64_t>(1, (bytes + step - 1) / step) * step;
}

class Slab {
 public:
  Slab(std::shared_ptr<Slabs> owner, uint64_t piece)
      : slabs(std::move(owner)),
        each(piece),
        count(static_cast<uint32_t>(std::max(kSlabBytes / each, kLeastPieces))),
        pages(segment_bytes(count * each)),
        taken((count + 63) / 64) {}

  [[nodiscard]] bool has_hole() const { return used < filled; }
  [[nodiscard]] bool has_fresh() const { return filled < count; }
  // What the next fresh piece adds to the pages in use.
  [[nodiscard]] uint64_t growth() const {
    return segment_bytes((filled + uint64_t{1}) * each) - segment_bytes(filled * each);
  }

  uint32_t take_hole() {
    for (;; ++hint) {
      if (const auto free = static_cast<uint32_t>(std::countr_one(taken[hint])); free < 64) {
        return take(hint * 64 + free);
      }
    }
  }
  uint32_t take_fresh() { return take(filled++); }
  void give_back(uint32_t index) {
    taken[index / 64] &= ~(uint64_t{1} << (index % 64));
    hint = std::min(hint, index / 64);
    --used;
  }

  std::shared_ptr<Slabs> slabs;  // which a piece must find when it ends
  uint64_t each;
  uint32_t count;
  uint32_t used = 0;
  uint32_t filled = 0;  // pieces from the front that were ever taken
  uint32_t hint = 0;    // no hole lies in a word before it
  Charge charge;        // given back after the pages
  Pages pages;
  std::vector<uint64_t> taken;

 private:
  uint32_t take(uint32_t index) {
    taken[index / 64] |= uint64_t{1} << (index % 64);
    ++used;
    return index;
  }
};

struct Slabs::State {
  // Of one size. Lowest addresses first, so that the others run empty.
  struct Class {
    std::set<Slab*> holes;  // with a place that was filled before
    std::set<Slab*> fresh;  // with pages that were not
  };

  std::shared_ptr<Room> room;
  std::mutex mutex;
  std::map<uint64_t, Class> classes;
};

Slabs::Slabs(std::shared_ptr<Room> room) : state_(std::make_unique<State>()) {
  state_->room = std::move(room);
}

Slabs::~Slabs() = default;

std::shared_ptr<Slabs> Slabs::make(std::shared_ptr<Room> room) {
  return std::shared_ptr<Slabs>(new Slabs(std::move(room)));
}

std::optional<Piece> Slabs::take(uint64_t bytes, std::string& lack) {
  const auto each = piece_bytes(bytes);
  const auto of = static_cast<uint32_t>(bytes);
  std::lock_guard lock(state_->mutex);
  auto& sort = state_->classes[each];
  if (!sort.holes.empty()) {
    auto* slab = *sort.holes.begin();
    const auto index = slab->take_hole();
    if (!slab->has_hole()) {
      sort.holes.erase(slab);
    }
    return Piece(slab, index, of);
  }
  const auto growth = sort.fresh.empty() ? segment_bytes(each) : (*sort.fresh.begin())->growth();
  auto charge = state_->room->take(growth, lack);
  if (!charge) {
    return std::nullopt;
  }
  // The caller fills it at once.
  charge->settle();
  if (sort.fresh.empty()) {
    auto slab = std::make_unique<Slab>(shared_from_this(), each);
    sort.fresh.insert(slab.get());
    slab.release();  // NOLINT(bugprone-unused-return-value): ended by its last piece
  }
  auto* slab = *sort.fresh.begin();
  slab->charge.add(std::move(*charge));
  const auto index = slab->take_fresh();
  if (!slab->has_fresh()) {
    sort.fresh.erase(slab);
  }
  return Piece(slab, index, of);
}

void Slabs::give_back(Slab* slab, uint32_t index) {
  std::unique_ptr<Slab> empty;  // its pages go after the lock
  std::lock_guard lock(state_->mutex);
  auto& sort = state_->classes[slab->each];
  slab->give_back(index);
  if (slab->used != 0) {
    sort.holes.insert(slab);
    return;
  }
  sort.holes.erase(slab);
  sort.fresh.erase(slab);
  empty.reset(slab);
}

Piece::Piece(Piece&& other) noexcept
    : slab_(std::exchange(other.slab_, nullptr)), index_(other.index_), bytes_(other.bytes_) {}

Piece::~Piece() {
  if (slab_ != nullptr) {
    const auto slabs = slab_->slabs;
    slabs->give_back(slab_, index_);
  }
}

std::byte* Piece::data() const { return slab_->pages.data() + index_ * slab_->each; }

std::shared_ptr<const Content> make_slab_content(const Source& source, Piece piece) {
  source.copy_to(piece.data());
  return std::make_shared<SlabContent>(std::move(piece));
}

std::shared_ptr<const Content> make_lone_slab(const Source& source, Charge charge) {
  return std::make_shared<LoneSlab>(source, std::move(charge));
}

}  // namespace tenure::store
