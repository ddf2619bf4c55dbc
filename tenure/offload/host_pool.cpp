#include <tenure/offload/host_pool.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <utility>

namespace tenure::offload {
namespace {

// Wide enough for any element type, for a cache line and for the copy engine.
constexpr size_t kAlign = 512;
constexpr size_t kPage = 4096;
// So much more than it has held may be pinned, and beyond that for so many shrinks.
constexpr double kMostSurplus = 0.04;
constexpr uint32_t kPatience = 3;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

std::vector<HostPool::Piece> HostPool::take(size_t bytes, Limit limit) {
  bytes = round_up(bytes, kAlign);
  std::lock_guard lock(mutex_);
  size_t available = pinned_ - held_;
  if (available < bytes) {
    grow(bytes - available, limit);
  }
  std::vector<Piece> out;
  size_t missing = bytes;
  while (missing > 0) {
    // The smallest that fits, else the largest there is.
    auto best = free_.begin();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const bool fits = it->second.bytes >= missing;
      const bool best_fits = best->second.bytes >= missing;
      if (fits ? !best_fits || it->second.bytes < best->second.bytes
               : !best_fits && it->second.bytes > best->second.bytes) {
        best = it;
      }
    }
    out.push_back(cut(best, std::min(missing, best->second.bytes)));
    missing -= out.back().bytes;
  }
  held_ += bytes;
  most_held_ = std::max(most_held_, held_);
  return out;
}

HostPool::Piece HostPool::cut(FreeMap::iterator at, size_t bytes) {
  Piece piece{at->first, bytes, at->second.busy};
  auto rest = at->second;
  free_.erase(at);
  if (rest.bytes > bytes) {
    rest.bytes -= bytes;
    free_.emplace(piece.data + bytes, std::move(rest));
  }
  return piece;
}

void HostPool::grow(size_t bytes, Limit limit) {
  std::vector<size_t> sizes;
  if (!source_.rounds_up) {
    sizes.push_back(round_up(bytes, kPage));
  } else {
    // Powers of two that add up to little more: the rest of the last one serves the next.
    const size_t least = std::max(kPage, std::bit_floor(bytes) / 32);
    while (bytes > 0) {
      sizes.push_back(std::max(least, std::bit_floor(bytes)));
      bytes -= std::min(bytes, sizes.back());
    }
  }
  uint64_t total = pinned_;
  for (const auto size : sizes) {
    total += size;
  }
  if (total > limit_ && limit == Limit::kept) {
    throw BudgetError(text("offloading needs ", bytes_text(total),
                           " of host memory and its host limit is ", bytes_text(limit_),
                           ": raise host_limit, or give host_full=\"keep\" to keep on the device "
                           "what does not fit"));
  }
  for (const auto size : sizes) {
    add_slab(size);
  }
}

void HostPool::add_slab(size_t bytes) {
  auto data = source_.allocate(bytes);
  auto* begin = static_cast<char*>(data.get());
  slabs_.emplace(begin, Slab{std::move(data), bytes});
  pinned_ += bytes;
  ++taken_;
  insert(begin, Free{.bytes = bytes, .busy = {}});
}

void HostPool::give(Piece piece) {
  std::lock_guard lock(mutex_);
  held_ -= piece.bytes;
  insert(piece.data, Free{.bytes = piece.bytes, .busy = std::move(piece.busy)});
}

uint64_t HostPool::next_order() {
  std::lock_guard lock(mutex_);
  return ++order_;
}

// Whether one piece may be made of two.
bool HostPool::absorb(Free& piece, const Free& neighbour) const {
  auto& busy = piece.busy;
  const auto& other = neighbour.busy;
  if (!source_.in_order) {
    if (!busy.ready() || !other.ready()) {
      return false;
    }
    busy = {};
  }
  if (other.out_order > busy.out_order) {
    busy.out = other.out;
    busy.out_order = other.out_order;
  }
  if (other.back_order > busy.back_order) {
    busy.back = other.back;
    busy.back_order = other.back_order;
  }
  piece.bytes += neighbour.bytes;
  return true;
}

// Joins neighbours of one slab.
void HostPool::insert(char* data, Free piece) {
  const auto slab = std::prev(slabs_.upper_bound(data));
  auto next = free_.lower_bound(data);
  if (next != free_.end() && next->first == data + piece.bytes &&
      next->first < slab->first + slab->second.bytes && absorb(piece, next->second)) {
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes == data && before->first >= slab->first &&
        absorb(piece, before->second)) {
      before->second = std::move(piece);
      return;
    }
  }
  free_.emplace(data, std::move(piece));
}

// Those that were not when they were given back.
void HostPool::join_ready() {
  if (source_.in_order) {
    return;
  }
  for (auto& [data, piece] : std::exchange(free_, {})) {
    insert(data, std::move(piece));
  }
}

HostPool::~HostPool() {
  if (process_ != fork_generation()) {
    return;  // a forked child has nothing under way, and no device to ask
  }
  try {
    for (const auto& [data, piece] : free_) {
      piece.busy.out.wait();
      piece.busy.back.wait();
    }
  } catch (const c10::Error&) {
    return;  // a device that has failed copies nothing any more
  }
}

bool HostPool::unused(char* begin, const Slab& slab) const {
  const auto whole = free_.find(begin);
  return whole != free_.end() && whole->second.bytes == slab.bytes && whole->second.busy.ready();
}

HostPool::SlabMap::iterator HostPool::give_back(SlabMap::iterator slab, std::vector<Slab>& ending) {
  pinned_ -= slab->second.bytes;
  free_.erase(slab->first);
  ending.push_back(std::move(slab->second));
  return slabs_.erase(slab);
}

void HostPool::give_back_unneeded(std::vector<Slab>& ending) {
  for (auto it = slabs_.begin(); it != slabs_.end();) {
    const bool needed = pinned_ - it->second.bytes < most_held_;
    it = needed || !unused(it->first, it->second) ? std::next(it) : give_back(it, ending);
  }
}

// The smallest that has all that is too much, else the largest.
void HostPool::give_back_too_large(std::vector<Slab>& ending) {
  most_lately_ = std::max(most_lately_, most_held_);
  const auto surplus = pinned_ - std::min(pinned_, most_lately_);
  if (static_cast<double>(surplus) <= kMostSurplus * static_cast<double>(most_lately_)) {
    too_much_ = 0;
    most_lately_ = 0;
    return;
  }
  if (++too_much_ < kPatience) {
    return;
  }
  auto best = slabs_.end();
  for (auto it = slabs_.begin(); it != slabs_.end(); ++it) {
    const auto bytes = it->second.bytes;
    if (!unused(it->first, it->second)) {
      continue;
    }
    if (best == slabs_.end() ||
        (best->second.bytes < surplus ? bytes > best->second.bytes
                                      : bytes >= surplus && bytes < best->second.bytes)) {
      best = it;
    }
  }
  if (best != slabs_.end()) {
    give_back(best, ending);
  }
  too_much_ = 0;
  most_lately_ = 0;
}

void HostPool::shrink() {
  std::vector<Slab> ending;
  {
    std::lock_guard lock(mutex_);
    join_ready();
    give_back_unneeded(ending);
    give_back_too_large(ending);
    most_held_ = held_;
  }
  if (!ending.empty()) {
    ending.clear();
    if (source_.trim) {
      source_.trim();
    }
  }
}

uint64_t HostPool::held() const {
  std::lock_guard lock(mutex_);
  return held_;
}

uint64_t HostPool::pinned() const {
  std::lock_guard lock(mutex_);
  return pinned_;
}

uint64_t HostPool::slabs_taken() const {
  std::lock_guard lock(mutex_);
  return taken_;
}

namespace {

c10::DataPtr plain_memory(size_t bytes) {
  auto* data = std::aligned_alloc(kPage, round_up(bytes, kPage));
  if (data == nullptr) {
    throw BudgetError(text("the host has no ", bytes_text(bytes),
                           " left for offloaded activations: give a host_limit, and "
                           "host_full=\"keep\" to keep on the device what does not fit"));
  }
  return {data, data, &std::free, c10::Device(c10::DeviceType::CPU)};
}

}  // namespace

HostPool::Source host_memory_for(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) {
    // Not torch's: whoever watches that would count the room, and what lies in it again.
    return {.allocate = &plain_memory, .trim = {}};
  }
  auto* pinned = at::getHostAllocator(type);
  return {.allocate = [pinned](size_t bytes) { return pinned->allocate(bytes); },
          .trim = [pinned] { pinned->empty_cache(); },
          .rounds_up = true};
}

}  // namespace tenure::offload
