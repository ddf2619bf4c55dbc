#include <tenure/pipeline/outcome.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <utility>
#include <vector>

namespace tenure::pipeline {

namespace {

// Over words that an operation may read and write after its wait has run out of time.
template <class Words>
std::vector<at::Tensor> over(const std::shared_ptr<Words>& words) {
  const auto count = static_cast<int64_t>(words->size());
  return {at::from_blob(words->data(), {count}, [words](void*) {}, at::kLong)};
}

}  // namespace

struct Outcome::Said {
  uint64_t step = 0;
  Here here = Here::well;
  std::optional<Failure> own;
  // The highest of all ranks' words: who failed, counted from one.
  std::shared_ptr<std::array<int64_t, 1>> word;
  c10::intrusive_ptr<c10d::Work> work;
};

Outcome::Outcome(c10::intrusive_ptr<c10d::ProcessGroup> side, std::chrono::milliseconds timeout)
    : side_(std::move(side)), timeout_(timeout) {}

Outcome::~Outcome() = default;

std::optional<Failure> Outcome::well(uint64_t step) {
  auto out = heard();
  say(step, Here::well, {});
  return out;
}

void Outcome::badly(uint64_t step, const std::optional<Failure>& own) {
  heard();
  say(step, Here::badly, own);
}

std::optional<Failure> Outcome::heard() {
  const auto said = std::move(said_);
  if (!said) {
    return std::nullopt;
  }
  said->work->wait(timeout_);
  const auto who = said->word->front() - 1;
  if (who < 0) {
    return std::nullopt;
  }
  const auto words = std::make_shared<Header::Words>(said->own ? Header::of(said->step, *said->own)
                                                               : Header::Words{});
  auto one = over(words);
  c10d::BroadcastOptions from;
  from.rootRank = who;
  side_->broadcast(one, from)->wait(timeout_);
  return said->here == Here::well ? std::optional(Header(*words).failure()) : std::nullopt;
}

void Outcome::say(uint64_t step, Here here, std::optional<Failure> own) {
  if (side_->getSize() == 1) {
    return;
  }
  auto said = std::make_unique<Said>();
  said->word = std::make_shared<std::array<int64_t, 1>>();
  said->word->front() = own ? side_->getRank() + 1 : 0;
  said->step = step;
  said->here = here;
  said->own = std::move(own);
  auto one = over(said->word);
  c10d::AllreduceOptions highest;
  highest.reduceOp = c10d::ReduceOp::MAX;
  said->work = side_->allreduce(one, highest);
  said_ = std::move(said);
}

}  // namespace tenure::pipeline
