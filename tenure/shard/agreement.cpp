#include <tenure/shard/agreement.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/shard/collectives.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

namespace tenure::shard {
namespace {

using std::chrono::milliseconds;

// How long ranks that have failed wait for each other's word.
constexpr milliseconds kGrace{3000};
constexpr milliseconds kPause{20};

using Words = std::array<int64_t, 4>;

Words packed(const Place& place) {
  return {static_cast<int64_t>(place.pass), static_cast<int64_t>(place.position),
          static_cast<int64_t>(place.use.unit), static_cast<int64_t>(place.use.phase)};
}

Place unpacked(const int64_t* words) {
  return {static_cast<uint64_t>(words[0]),
          static_cast<uint64_t>(words[1]),
          {static_cast<uint32_t>(words[2]), static_cast<Phase>(words[3])}};
}

}  // namespace

Agreement::Agreement(c10::intrusive_ptr<c10d::ProcessGroup> side,
                     c10::intrusive_ptr<c10d::Store> store, milliseconds timeout)
    : side_(std::move(side)),
      store_(std::move(store)),
      timeout_(timeout),
      rank_(static_cast<uint32_t>(side_->getRank())),
      ranks_(static_cast<uint32_t>(side_->getSize())) {}
Agreement::Agreement(Agreement&&) noexcept = default;
Agreement& Agreement::operator=(Agreement&&) noexcept = default;
Agreement::~Agreement() = default;

std::string Agreement::key(std::string_view what, uint32_t rank) const {
  return text(what, "/", rank);
}

void Agreement::require(const Place& place, const std::string& here, const Tell& tell) {
  if (ranks_ == 1) {
    return;
  }
  const auto mine = packed(place);
  // Ranks that follow the order of the last pass do not come here: they look it up if they wait in
  // vain.
  store_->set(key("at", rank_), here);
  auto words = at::empty({static_cast<int64_t>(mine.size())}, at::kLong);
  std::copy(mine.begin(), mine.end(), words.mutable_data_ptr<int64_t>());
  auto all = at::empty({static_cast<int64_t>(mine.size() * ranks_)}, at::kLong);
  try {
    gather_into(*side_, all, words).wait(timeout_, [&] { return text(here, " on rank ", rank_); });
  } catch (const CollectiveError& error) {
    throw CollectiveError(text(error.what(), "; ", others(here)));
  }
  std::string elsewhere;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    const auto* theirs = all.const_data_ptr<int64_t>() + rank * mine.size();
    if (!std::equal(mine.begin(), mine.end(), theirs)) {
      elsewhere +=
          text(elsewhere.empty() ? "" : ", ", "rank ", rank, " is ", tell(unpacked(theirs)));
    }
  }
  if (!elsewhere.empty()) {
    throw CollectiveError(text("ranks do not use the same units: rank ", rank_, " is ", here, ", ",
                               elsewhere,
                               "; every rank must run the same modules in the same order"));
  }
}

void Agreement::share(std::vector<uint8_t>& flags, const std::string& here) {
  if (ranks_ == 1 || flags.empty()) {
    return;
  }
  auto all = at::empty({static_cast<int64_t>(flags.size())}, at::kByte);
  std::ranges::copy(flags, all.mutable_data_ptr<uint8_t>());
  std::vector<at::Tensor> tensors{all};
  try {
    Pending([&] { return side_->allreduce(tensors, {c10d::ReduceOp::MAX}); }).wait(timeout_, [&] {
      return text(here, " on rank ", rank_);
    });
  } catch (const CollectiveError& error) {
    throw CollectiveError(text(error.what(), "; ", others(here)));
  }
  std::copy_n(all.const_data_ptr<uint8_t>(), flags.size(), flags.begin());
}

std::string Agreement::others(const std::string& here) noexcept {
  try {
    return ask_others(here);
  } catch (const std::exception&) {
    return "the store does not answer: the process that has it may have died";
  }
}

std::string Agreement::ask_others(const std::string& here) {
  const auto round = text("failed/", failures_++);
  store_->set(key(round, rank_), here);
  std::string out;
  const auto deadline = std::chrono::steady_clock::now() + std::min(kGrace, timeout_);
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) {
      continue;
    }
    const auto failed = key(round, rank);
    while (!store_->check({failed}) && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kPause);
    }
    out += text(out.empty() ? "rank " : ", rank ", rank);
    const auto told = store_->check({failed})            ? failed
                      : store_->check({key("at", rank)}) ? key("at", rank)
                                                         : std::string();
    if (told.empty()) {
      out += " does not answer";
      continue;
    }
    const auto words = store_->get(told);
    out += text(told == failed ? " is " : " does not answer; the last it said was: ",
                std::string(words.begin(), words.end()));
  }
  return out;
}

}  // namespace tenure::shard
