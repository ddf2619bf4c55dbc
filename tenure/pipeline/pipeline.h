// Pipeline: runs one rank's part of a schedule. One thread steps; while it does nobody else calls.
//
//   Pipeline pipeline(make_schedule("1f1b", 4, 8), std::move(stages), groups, options);
//   const auto result = pipeline.step(Pass::train, loss);
#pragma once

#include <tenure/pipeline/bound.h>
#include <tenure/pipeline/channel.h>
#include <tenure/pipeline/schedule.h>
#include <tenure/pipeline/stage.h>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tenure::pipeline {

enum class Strict : uint8_t { off, on };

struct Options {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  Strict strict = Strict::off;
};

enum class Pass : uint8_t { train, forward };

// Of what this rank was given.
struct Given {
  // By microbatch; empty where that has no rows, or nothing was given.
  std::vector<int64_t> batch_rows;   // on the rank of the first stage
  std::vector<int64_t> target_rows;  // on the rank of the last one
  // A number for all of its shapes: strict has figures of its own for each.
  uint64_t shapes = 0;
};

struct StepResult {
  // On the rank of the last stage: the sum of the microbatches' losses, each times its part of the
  // batch's rows.
  at::Tensor loss;
  // There, too, if there is no loss to be found: what the stage made, by microbatch.
  std::vector<std::vector<at::Tensor>> outputs;
};

struct Promise {
  InFlight in_flight;            // the most at once
  std::optional<int64_t> bytes;  // of these; strict, once a step has shown what one takes
  std::vector<MicrobatchBytes> microbatch;  // by stage of the rank; the same
  uint32_t receives = 0;                    // asked for ahead, at most
  uint32_t sends = 0;                       // under way to one peer in one direction, at most
};

struct Stats {
  uint64_t steps = 0;
  uint64_t failed_steps = 0;
  InFlight most_in_flight;               // in the last step
  std::optional<int64_t> peak_bytes;     // strict: between actions, above the step's begin
  std::optional<int64_t> highest_bytes;  // strict: at any moment
  std::optional<int64_t> message_bytes;  // strict: what messages took of peak_bytes, at most
  ChannelStats channel;
};

class Pipeline {
 public:
  // `stages` are the rank's, in the order of the model. Throws InputError if the schedule cannot
  // run, or is for other ranks or stages.
  Pipeline(Schedule schedule, std::vector<std::unique_ptr<Stage>> stages, Groups groups,
           Options options = {});
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // All microbatches through all stages; all ranks call it. Where neither batch nor target has rows
  // all microbatches are equal parts. Throws what a stage of this rank threw, InputError for a
  // target that is not split as the batch is, or CollectiveError for another rank's failure; then
  // nothing of the step is left but gradients that it added.
  StepResult step(Pass pass, const Loss& loss, const Given& given = {});
  // A step that failed before it began, so that the other ranks hear of it.
  void refuse(Pass pass, const std::string& why);

  // What this rank was doing when its last failed step failed here; empty if it failed elsewhere.
  const std::string& failed_in() const;

  const Schedule& schedule() const;
  uint32_t rank() const;
  Promise promise() const;
  Stats stats() const;

 private:
  struct State;
  class Step;
  std::unique_ptr<State> state_;
};

}  // namespace tenure::pipeline
