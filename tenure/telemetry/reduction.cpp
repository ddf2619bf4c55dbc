#include <tenure/telemetry/reduction.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string_view>
#include <utility>

namespace tenure::telemetry {
namespace {

// A rank may be late by an evaluation or a checkpoint; one that is gone is known by its connection.
constexpr std::chrono::hours kCollectiveTimeout{24};

// A collective that others have not joined cannot be called off, and Gloo's threads still write to
// its tensor: what they need is left to them for good. It ends with the process.
struct Left {
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor words;
};
struct AllLeft {
  std::mutex mutex;
  std::vector<Left> collectives;
  std::vector<std::vector<Reduction::Group>> groups;  // whose destructors wait for collectives
};
AllLeft& all_left() {
  static auto* all = new AllLeft;
  return *all;
}

}  // namespace

Reduction::Reduction(std::vector<Group> mine, size_t levels)
    : mine_(std::move(mine)), levels_(levels) {}

Reduction::~Reduction() {
  if (broken_) {
    const std::lock_guard lock(all_left().mutex);
    all_left().groups.push_back(std::move(mine_));
  }
}

bool Reduction::reduce(const at::Tensor& words, const std::stop_token& stop) {
  if (broken_) {
    throw CollectiveError("telemetry's group is not in use any more");
  }
  std::vector<at::Tensor> tensors = {words};
  const auto run = [&](const c10::intrusive_ptr<c10d::Work>& work) {
    ++collectives_;
    if (finished(work, stop)) {
      return true;
    }
    broken_ = true;
    const std::lock_guard lock(all_left().mutex);
    all_left().collectives.push_back({work, words});
    return false;
  };
  try {
    for (const auto& group : mine_) {
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::ReduceOp::MAX;
      options.timeout = kCollectiveTimeout;
      if (!run(group->allreduce(tensors, options))) {
        return false;
      }
    }
    for (size_t level = mine_.size(); level-- > 0;) {
      c10d::BroadcastOptions options;
      options.timeout = kCollectiveTimeout;
      if (level + 1 < levels_ && !run(mine_[level]->broadcast(tensors, options))) {
        return false;
      }
    }
  } catch (const std::exception& error) {
    broken_ = true;
    // Gloo passes words around in a ring: a rank that is gone is seen by its neighbours, and those
    // two by theirs when their connections go, too. Nothing is under way on them any more.
    mine_.clear();
    throw CollectiveError(text("a rank has left: ", first_line(error.what())));
  }
  return true;
}

bool Reduction::finished(const c10::intrusive_ptr<c10d::Work>& work, const std::stop_token& stop) {
  using namespace std::chrono_literals;
  std::mutex mutex;
  std::condition_variable_any woken;
  // Asked rather than waited for: a wait could not be ended. In a job that is in step it is over
  // in less than a millisecond; for a straggler there is time.
  for (std::chrono::microseconds pause = 100us; !work->isCompleted();
       pause = std::min<std::chrono::microseconds>(pause * 2, 10ms)) {
    std::unique_lock lock(mutex);
    woken.wait_for(lock, stop, pause, [] { return false; });
    if (stop.stop_requested() && !work->isCompleted()) {
      return false;
    }
  }
  work->wait();  // throws what went wrong
  return true;
}

}  // namespace tenure::telemetry
