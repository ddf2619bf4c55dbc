// Trainer: one rank of a training job: the loop, and all that happens in it.
//
//   Trainer trainer(job, groups);
//   trainer.run(listener);
//
// Rank r of the world is rank r / dp of pipeline r % dp. All ranks make the same calls; one thread.
#pragma once

#include <tenure/pipeline/channel.h>
#include <tenure/train/job.h>
#include <tenure/train/parameters.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tenure::train {

struct TrainGroups {
  pipeline::Groups pipe;  // the ranks of this rank's pipeline
  DataGroup data;         // those with the same stages; its timeout is the job's
  c10::intrusive_ptr<c10d::ProcessGroup> world;  // all, on the host
};

// What a rank did with its memory in a step, by its allocator.
struct RankReport {
  std::string stages;  // "embedding, layers 0-1"
  uint32_t in_flight = 0;
  uint32_t in_flight_bound = 0;
  std::optional<int64_t> activations;        // strict, from the second step on: between two actions
  std::optional<int64_t> activations_bound;  // the same: of microbatches and messages
  int64_t allocated = 0;                     // now; 0 where nobody counts
  int64_t peak = 0;                          // at any moment
  int64_t rss = 0;
  // With Job::fit, of a step that followed its plan: the most while the session was active.
  std::optional<int64_t> fitted;
};

struct StepReport {
  int64_t step = 0;  // the first is 1
  double loss = 0;
  double norm = 0;
  double learning_rate = 0;
  int64_t tokens = 0;  // of all ranks
  double seconds = 0;
  std::vector<RankReport> ranks;
};

// Told on every rank, with equal figures.
class Listener {
 public:
  Listener() = default;
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  virtual ~Listener() = default;

  // false: no more, please. All ranks stop soon after any of them says so, at the same step.
  virtual bool stepped(const StepReport& report) = 0;
  virtual void evaluated(int64_t step, double loss) = 0;
  virtual void sampled(int64_t step, const std::vector<int64_t>& prompt,
                       const std::vector<int64_t>& tokens) = 0;
  virtual void saved(int64_t step, const std::string& path) = 0;
};

class Trainer {
 public:
  // Throws InputError for a job that cannot run; see check().
  Trainer(const Job& job, TrainGroups groups);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Trains until the job's last step or until a listener has had enough, and saves what there is.
  // Throws CollectiveError for a rank that ended or does not answer, BudgetError for memory that
  // is more than was promised.
  void run(Listener& listener);

  int64_t steps() const;       // of the job
  int64_t begin_step() const;  // of the checkpoint that it goes on from, or 0
  int64_t parameters() const;  // of the whole model, in numbers
  Weights weights() const;     // whole, of this rank's stages. A collective.

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tenure::train
