// HostPool: the host memory in which offloaded storages rest. Takes memory in slabs and gives it
// out by the byte, in as many pieces as it takes, so that what is pinned is what is held: torch's
// own cache of pinned memory rounds every tensor up to a power of two.
//
// Note [Reuse waits on the stream]
// Memory that is given back may still be written or read by copies that were queued but have not
// run. It is handed out again at once, together with the fences of those copies: whoever writes to
// it next makes its stream wait. So no host thread waits, and a step of the same shapes as the last
// finds all the memory it needs.
//
// Any thread may call.
#pragma once

#include <tenure/core/fence.h>
#include <tenure/core/fork.h>

#include <c10/core/Allocator.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace tenure::offload {

class HostPool {
 public:
  // Where slabs come from. `rounds_up`: the source rounds sizes up to powers of two, so ask for
  // such sizes alone.
  struct Source {
    std::function<c10::DataPtr(size_t bytes)> allocate;
    std::function<void()> trim;  // after slabs were freed; may be empty
    bool rounds_up = false;
    // Copies of one direction run in the order in which they are queued, so that of two fences the
    // younger stands for both. Else neighbours are joined only when they are ready.
    bool in_order = true;
  };
  // The last copies that use a piece, one a direction, and how many were queued before each.
  struct Busy {
    Fence out;   // writes to the host
    Fence back;  // reads from it
    uint64_t out_order = 0;
    uint64_t back_order = 0;
    bool ready() const { return out.ready() && back.ready(); }
  };
  struct Piece {
    char* data = nullptr;
    size_t bytes = 0;
    Busy busy;  // to be waited for before the first write
  };

  HostPool(Source source, uint64_t limit) : source_(std::move(source)), limit_(limit) {}
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;
  // Waits for copies that still use the memory: it is someone else's next.
  ~HostPool();

  // Backward cannot go on without the bytes that it asks for, so room to read them is found anyway.
  enum class Limit : uint8_t { kept, exceeded };
  // Exactly `bytes`, cut only where it must be. Throws BudgetError if that would take more than
  // the limit, changing nothing.
  std::vector<Piece> take(size_t bytes, Limit limit = Limit::kept);
  // May be written to again when `busy` is ready.
  void give(Piece piece);
  // The number of a copy that is queued now, for Busy.
  uint64_t next_order();
  // Gives slabs back that are not needed for as much as was held at once since the last call. One
  // that is needed only in part is given back when that has been so for some calls: what is missing
  // then is taken anew.
  void shrink();

  uint64_t held() const;         // given out
  uint64_t pinned() const;       // taken from the source
  uint64_t slabs_taken() const;  // ever

 private:
  struct Free {
    size_t bytes = 0;
    Busy busy;
  };
  struct Slab {
    c10::DataPtr data;
    size_t bytes = 0;
  };
  using FreeMap = std::map<char*, Free>;
  using SlabMap = std::map<char*, Slab>;

  void grow(size_t bytes, Limit limit);
  void add_slab(size_t bytes);
  Piece cut(FreeMap::iterator at, size_t bytes);
  void insert(char* data, Free piece);
  bool absorb(Free& piece, const Free& neighbour) const;
  void join_ready();
  bool unused(char* begin, const Slab& slab) const;
  SlabMap::iterator give_back(SlabMap::iterator slab, std::vector<Slab>& ending);
  void give_back_unneeded(std::vector<Slab>& ending);
  void give_back_too_large(std::vector<Slab>& ending);

  mutable std::mutex mutex_;
  Source source_;
  uint64_t limit_;
  SlabMap slabs_;
  FreeMap free_;
  uint64_t held_ = 0;
  uint64_t most_held_ = 0;    // since the last shrink
  uint64_t most_lately_ = 0;  // since there is too much
  uint32_t too_much_ = 0;     // shrinks since then
  uint64_t pinned_ = 0;
  uint64_t taken_ = 0;
  uint64_t order_ = 0;
  uint32_t process_ = fork_generation();
};

// Pinned memory for copies to and from that kind of device, plain memory for the CPU.
HostPool::Source host_memory_for(c10::DeviceType type);

}  // namespace tenure::offload
