#include <tenure/shard/collectives.h>

#include <tenure/core/error.h>
#include <tenure/core/owner.h>
#include <tenure/core/text.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace tenure::shard {
namespace {

using Work = Pending::Work;

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

// Beyond so many ranks a backend's own way through the ranks is the better one.
constexpr uint32_t kMostByMessages = 8;
// Tags that a program would hardly use.
constexpr int kGather = 0x7e40;
constexpr int kReduce = 0x7e41;

Work send(c10d::ProcessGroup& group, at::Tensor tensor, uint32_t to, int tag) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return group.send(tensors, static_cast<int>(to), tag);
}

Work receive(c10d::ProcessGroup& group, at::Tensor tensor, uint32_t from, int tag) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return group.recv(tensors, static_cast<int>(from), tag);
}

OwnerId owner() {
  static const auto id = intern_owner(OwnerKind::workspace, "shard: collectives");
  return id;
}

class Done : public Fence::Point {
 public:
  explicit Done(Work work) : work_(std::move(work)) {}
  bool ready() const override { return work_->isCompleted(); }
  void wait_on_host() const override {
    while (!work_->isCompleted()) {  // wait() would throw if it has failed, which is done too
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  void wait_on(const c10::Stream& /*stream*/) const override { wait_on_host(); }

 private:
  Work work_;
};

}  // namespace

Pending::Pending() = default;
Pending::Pending(const std::function<Work()>& begin) {
  start([&] { works_.push_back(begin()); });
}
Pending::Pending(const std::function<std::vector<Work>()>& begin, Alias from, Alias into)
    : tensors_{std::move(from), std::move(into)}, messages_(true) {
  start([&] { works_ = begin(); });
}
Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(Pending&&) noexcept = default;
Pending::~Pending() {
  works_.clear();  // before what they read and write
}

void Pending::start(const std::function<void()>& begin) {
  try {
    begin();
  } catch (const std::exception&) {
    refused_ = std::current_exception();
  }
}

void Pending::wait(std::chrono::milliseconds timeout, const Words& what) const {
  try {
    if (refused_) {
      std::rethrow_exception(refused_);
    }
    for (const auto& work : works_) {
      work->wait(timeout);
    }
  } catch (const std::exception& error) {
    const std::string_view said = error.what();
    throw CollectiveError(text(what(), " failed: ", said.substr(0, said.find('\n'))));
  }
}

Fence Pending::give_up() {
  const auto works = std::exchange(works_, {});
  // A message ends with its handle.
  return works.empty() || messages_ ? Fence() : Fence(std::make_shared<Done>(works.front()));
}

at::Tensor Sum::result() {
  auto sum = own.tensor();
  if (incoming.defined()) {
    auto parts = incoming.tensor().split(sum.numel());
    for (size_t i = 1; i < parts.size(); ++i) {
      parts[0].add_(parts[i]);
    }
    sum = parts[0].add_(sum);
  }
  // A view would keep all of its storage.
  return sum.nbytes() == sum.storage().nbytes() ? sum : sum.clone();
}

Pending gather_into(c10d::ProcessGroup& group, at::Tensor whole, at::Tensor piece) {
  return Pending([&] { return gather_single(group, whole, piece); });
}

Collectives::Collectives(c10::intrusive_ptr<c10d::ProcessGroup> group,
                         c10::intrusive_ptr<c10d::ProcessGroup> replicas)
    : group_(std::move(group)),
      replicas_(std::move(replicas)),
      rank_(static_cast<uint32_t>(group_->getRank())),
      ranks_(static_cast<uint32_t>(group_->getSize())),
      replicas_size_(replicas_ == nullptr ? 1 : static_cast<uint32_t>(replicas_->getSize())) {}
Collectives::Collectives(Collectives&&) noexcept = default;
Collectives& Collectives::operator=(Collectives&&) noexcept = default;
Collectives::~Collectives() = default;

template <class Pair>
std::vector<Work> Collectives::with_others(Pair pair) const {
  std::vector<Work> out;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_) {
      auto [from, to] = pair(rank);
      out.push_back(std::move(from));
      out.push_back(std::move(to));
    }
  }
  return out;
}

bool Collectives::by_messages(const at::Tensor& tensor) const {
  return ranks_ <= kMostByMessages && tensor.is_cpu() && group_->getBackendName() == "gloo";
}

Pending Collectives::gather(at::Tensor whole) {
  if (ranks_ == 1) {
    return {};
  }
  const auto size = whole.numel() / ranks_;
  auto own = whole.narrow(0, rank_ * size, size);
  if (!by_messages(whole)) {
    // As bytes: a backend knows fewer types than tensors have.
    return gather_into(*group_, whole.view(at::kByte), own.view(at::kByte));
  }
  const auto begin = [&] {
    return with_others([&](uint32_t other) {
      return std::pair{receive(*group_, whole.narrow(0, other * size, size), other, kGather),
                       send(*group_, own, other, kGather)};
    });
  };
  return {begin, Alias(own, owner()), Alias(whole, owner())};
}

Sum Collectives::reduce(at::Tensor whole) {
  const auto size = whole.numel() / ranks_;
  if (ranks_ == 1) {
    return {{}, Alias(whole, owner()), {}};
  }
  if (!by_messages(whole)) {
    auto sum = at::empty({size}, whole.options());
    auto pending = Pending([&] { return reduce_scatter_single(*group_, sum, whole); });
    return {std::move(pending), Alias(sum, owner()), {}};
  }
  auto incoming = at::empty({size * (ranks_ - 1)}, whole.options());
  const auto begin = [&] {
    return with_others([&](uint32_t other) {
      const auto at = other < rank_ ? other : other - 1;
      return std::pair{receive(*group_, incoming.narrow(0, at * size, size), other, kReduce),
                       send(*group_, whole.narrow(0, other * size, size), other, kReduce)};
    });
  };
  auto own = Alias(whole.narrow(0, rank_ * size, size), owner());
  return {{begin, Alias(whole, owner()), Alias(incoming, owner())},
          std::move(own),
          Alias(incoming, owner())};
}

Pending Collectives::add_replicas(at::Tensor piece) {
  if (replicas_size_ == 1) {
    return {};
  }
  std::vector<at::Tensor> tensors{std::move(piece)};
  return Pending([&] { return replicas_->allreduce(tensors); });
}

void Collectives::broadcast(const at::Tensor& tensor,
                            const std::function<void(const Pending&)>& wait) {
  std::vector<at::Tensor> tensors{tensor.view(at::kByte)};
  if (replicas_size_ > 1) {  // the first of each group have the values of the very first
    wait(Pending([&] { return replicas_->broadcast(tensors); }));
  }
  if (ranks_ > 1) {
    wait(Pending([&] { return group_->broadcast(tensors); }));
  }
}

}  // namespace tenure::shard
