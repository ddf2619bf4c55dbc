// Collectives: what shard asks of a process group, in the way that its backend does well. Nothing
// here blocks the host but wait(), also on an accelerator: to see that it has taken longer than the
// timeout, NCCL's wait() looks at the collective until it is done.
// One thread at a time, and the same calls in the same order on every rank.
#pragma once

#include <tenure/core/fence.h>
#include <tenure/shard/part.h>

#include <c10/util/intrusive_ptr.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace tenure::shard {

// A collective under way. What it reads and writes lives as long as this.
//
// A backend that knows of a rank's end already refuses to begin anything with it. That fails as
// what fails later does, when it is waited for: so Pending begins it itself.
class Pending {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  Pending();
  explicit Pending(const std::function<Work()>& begin);
  // Messages between pairs of ranks, from one tensor into the other.
  Pending(const std::function<std::vector<Work>()>& begin, Alias from, Alias into);
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;
  ~Pending();

  // Throws CollectiveError, which says what `what` was, if it failed or takes longer than
  // `timeout`.
  using Words = std::function<std::string()>;
  void wait(std::chrono::milliseconds timeout, const Words& what) const;
  // It has failed. When the fence is ready the backend has done with its tensors.
  Fence give_up();

 private:
  // Keeps what `begin` throws for wait().
  void start(const std::function<void()>& begin);

  std::vector<Work> works_;
  std::exception_ptr refused_;
  std::array<Alias, 2> tensors_;
  bool messages_ = false;
};

// A sum over ranks under way.
struct Sum {
  Pending pending;
  Alias own;       // this rank's part of what it gave, or the sum already
  Alias incoming;  // the other ranks' parts, one after the other, if they are added up here

  // REQUIRES: waited for. A tensor that is no larger than it must be.
  at::Tensor result();
};

// Every rank's `piece`, one after the other, into `whole`.
Pending gather_into(c10d::ProcessGroup& group, at::Tensor whole, at::Tensor piece);

class Collectives {
 public:
  // Each rank of `group` has a piece of its own. Ranks of `replicas`, if there is that group, have
  // the same piece.
  explicit Collectives(c10::intrusive_ptr<c10d::ProcessGroup> group,
                       c10::intrusive_ptr<c10d::ProcessGroup> replicas = {});
  Collectives(Collectives&&) noexcept;
  Collectives& operator=(Collectives&&) noexcept;
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;
  ~Collectives();

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }
  uint32_t replicas() const { return replicas_size_; }

  // Every rank's piece. REQUIRES: this rank's is there already.
  Pending gather(at::Tensor whole);
  // The sum over ranks of this rank's piece of `whole`; what is in `whole` afterwards is undefined.
  Sum reduce(at::Tensor whole);
  // The sum over replicas, in place.
  Pending add_replicas(at::Tensor piece);
  // The first rank's values for all, in place.
  void broadcast(const at::Tensor& tensor, const std::function<void(const Pending&)>& wait);

 private:
  // Whether messages between pairs of ranks do better than the backend's collectives: on Gloo they
  // go straight to where they belong, where its collectives copy, and nothing is sent twice.
  bool by_messages(const at::Tensor& tensor) const;

  // What `pair` begins with each other rank: a message from it and one to it.
  template <class Pair>
  std::vector<Pending::Work> with_others(Pair pair) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::ProcessGroup> replicas_;  // none: there is one copy of everything
  uint32_t rank_ = 0;
  uint32_t ranks_ = 1;
  uint32_t replicas_size_ = 1;
};

}  // namespace tenure::shard
