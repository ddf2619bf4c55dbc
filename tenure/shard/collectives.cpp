#include <tenure/shard/collectives.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <utility>
#include <vector>

namespace tenure::shard {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

// The same call has another name from torch 2.13 on.
template <class Group>
Work gather_single(Group& group, at::Tensor& whole, at::Tensor& piece) {
  if constexpr (requires { group.all_gather_single(whole, piece); }) {
    return group.all_gather_single(whole, piece);
  } else {
    return group._allgather_base(whole, piece);
  }
}

template <class Group>
Work reduce_scatter_single(Group& group, at::Tensor& piece, at::Tensor& whole) {
  if constexpr (requires { group.reduce_scatter_single(piece, whole); }) {
    return group.reduce_scatter_single(piece, whole);
  } else {
    return group._reduce_scatter_base(piece, whole);
  }
}

class Done : public Fence::Point {
 public:
  explicit Done(Work work) : work_(std::move(work)) {}
  bool ready() const override { return work_->isCompleted(); }
  void wait_on_host() const override {
    try {
      work_->wait();
    } catch (const std::exception&) {  // failed is done too
    }
  }
  void wait_on(const c10::Stream& /*stream*/) const override { wait_on_host(); }

 private:
  Work work_;
};

}  // namespace

Pending::Pending() = default;
Pending::Pending(Work work) : work_(std::move(work)) {}
Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(Pending&&) noexcept = default;
Pending::~Pending() = default;

void Pending::wait(std::chrono::milliseconds timeout, const std::string& what) const {
  if (!work_) {
    return;
  }
  try {
    work_->wait(timeout);
  } catch (const std::exception& error) {
    const std::string_view said = error.what();
    throw CollectiveError(text(what, " failed: ", said.substr(0, said.find('\n'))));
  }
}

Fence Pending::done() const { return work_ ? Fence(std::make_shared<Done>(work_)) : Fence(); }

Pending gather_into(c10d::ProcessGroup& group, at::Tensor whole, at::Tensor piece) {
  return Pending(gather_single(group, whole, piece));
}

Collectives::Collectives(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)),
      rank_(static_cast<uint32_t>(group_->getRank())),
      ranks_(static_cast<uint32_t>(group_->getSize())) {}
Collectives::Collectives(Collectives&&) noexcept = default;
Collectives& Collectives::operator=(Collectives&&) noexcept = default;
Collectives::~Collectives() = default;

Pending Collectives::gather(at::Tensor whole, at::Tensor piece) {
  if (ranks_ == 1) {
    whole.copy_(piece);
    return {};
  }
  return gather_into(*group_, std::move(whole), std::move(piece));
}

Pending Collectives::reduce(at::Tensor whole, at::Tensor& sum) {
  const auto size = whole.numel() / ranks_;
  if (ranks_ == 1) {
    sum = whole;
    return {};
  }
  if (whole.is_cpu()) {
    // Gloo's all-reduce takes half the time of its reduce-scatter.
    sum = whole.narrow(0, rank_ * size, size);
    std::vector<at::Tensor> tensors{std::move(whole)};
    return Pending(group_->allreduce(tensors));
  }
  sum = at::empty({size}, whole.options());
  return Pending(reduce_scatter_single(*group_, sum, whole));
}

Pending Collectives::broadcast(at::Tensor tensor) {
  if (ranks_ == 1) {
    return {};
  }
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return Pending(group_->broadcast(tensors));
}

Pending Collectives::add_up(at::Tensor tensor) {
  if (ranks_ == 1) {
    return {};
  }
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return Pending(group_->allreduce(tensors));
}

}  // namespace tenure::shard
