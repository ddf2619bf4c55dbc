// Collectives: what shard asks of a process group, in the way that its backend does well. Nothing
// here blocks the host but wait(); on an accelerator that makes the current stream wait instead.
// One thread at a time, and the same calls in the same order on every rank.
#pragma once

#include <tenure/core/fence.h>

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace at {
class Tensor;
}  // namespace at
namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace tenure::shard {

// A collective under way. Its tensors live until it is done: the backend holds them.
class Pending {
 public:
  Pending();
  explicit Pending(c10::intrusive_ptr<c10d::Work> work);
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;
  ~Pending();

  // Throws CollectiveError, which says what `what` was, if it fails or takes longer than `timeout`.
  void wait(std::chrono::milliseconds timeout, const std::string& what) const;
  // Ready when the backend has done with its tensors, also if it has failed.
  Fence done() const;

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

// Every rank's `piece`, one after the other, into `whole`.
Pending gather_into(c10d::ProcessGroup& group, at::Tensor whole, at::Tensor piece);

class Collectives {
 public:
  explicit Collectives(c10::intrusive_ptr<c10d::ProcessGroup> group);
  Collectives(Collectives&&) noexcept;
  Collectives& operator=(Collectives&&) noexcept;
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;
  ~Collectives();

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }

  Pending gather(at::Tensor whole, at::Tensor piece);
  // The sum over ranks of this rank's piece of `whole`; what is in `whole` afterwards is undefined.
  // The result is a view of `whole` or a tensor of its own, to be read once the collective is done.
  Pending reduce(at::Tensor whole, at::Tensor& sum);
  // Rank 0's values for all, in place.
  Pending broadcast(at::Tensor tensor);
  // The sum over ranks, in place.
  Pending add_up(at::Tensor tensor);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  uint32_t rank_ = 0;
  uint32_t ranks_ = 1;
};

}  // namespace tenure::shard
