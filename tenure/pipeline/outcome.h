// Outcome: how the steps of a pipeline's ranks ended, told to all of them. One thread.
//
// Note [A failure after the last message]
// A rank that fails in a step says so in the messages that it owes. After the last of them it owes
// nothing, and the others may have ended the step. To wait for all ranks at its end would leave
// some idle, which have weights to update or microbatches to begin. So each rank says at the end of
// a step how it went, in an all-reduce that runs beside the next step, and reads at the end of that
// one what the others said: who failed is known one step late, and on every rank.
#pragma once

#include <tenure/pipeline/header.h>

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

namespace c10d {
class ProcessGroup;
}

namespace tenure::pipeline {

class Outcome {
 public:
  Outcome(c10::intrusive_ptr<c10d::ProcessGroup> side, std::chrono::milliseconds timeout);
  ~Outcome();
  Outcome(const Outcome&) = delete;
  Outcome& operator=(const Outcome&) = delete;

  // This rank has ended step `step`; all ranks call it, for each. Returns who failed in the step
  // before, if this rank had ended that one well. Throws what the backend throws.
  std::optional<Failure> well(uint64_t step);
  // The same of a step that did not end well here; `own`, if it was this rank that failed.
  void badly(uint64_t step, const std::optional<Failure>& own);

 private:
  enum class Here : uint8_t { well, badly };
  struct Said;

  std::optional<Failure> heard();
  void say(uint64_t step, Here here, std::optional<Failure> own);

  c10::intrusive_ptr<c10d::ProcessGroup> side_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<Said> said_;  // of the last step
};

}  // namespace tenure::pipeline
