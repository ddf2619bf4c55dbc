#include <tenure/train/world.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/shard/collectives.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

namespace tenure::train {

World::World(c10::intrusive_ptr<c10d::ProcessGroup> host, std::chrono::milliseconds timeout)
    : host_(std::move(host)),
      timeout_(timeout),
      rank_(host_->getRank()),
      ranks_(host_->getSize()) {}
World::~World() = default;

std::vector<std::vector<double>> World::share(const std::vector<double>& own,
                                              const std::string& doing) {
  if (ranks_ == 1) {
    return {own};
  }
  const auto options = at::TensorOptions().dtype(at::kDouble);
  std::vector<at::Tensor> mine{at::tensor(own, options)};
  std::vector<std::vector<at::Tensor>> all(1);
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    all.front().push_back(at::empty({static_cast<int64_t>(own.size())}, options));
  }
  shard::Pending([&] { return host_->allgather(all, mine); }).wait(timeout_, [&] {
    return text(doing, " on rank ", rank_);
  });
  std::vector<std::vector<double>> out;
  for (const auto& one : all.front()) {
    const auto* values = one.const_data_ptr<double>();
    out.emplace_back(values, values + own.size());
  }
  return out;
}

void World::require_all(bool well, const std::string& doing) {
  const auto all = share({well ? 1.0 : 0.0}, doing);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].front() == 0) {
      throw CollectiveError(text("rank ", rank, " failed ", doing, ", and says itself why."));
    }
  }
}

}  // namespace tenure::train
