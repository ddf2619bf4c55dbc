// Account: in strict mode, that a step keeps to its bound. Reads the allocator between actions and
// holds it against what the schedule allows. One thread.
//
// Note [What is held against the bound]
// A step whose shapes are new is a lesson: how much one microbatch leaves behind on each stage, and
// how much of that is there between its two half backwards. In the next one with these shapes the
// figures settle, for the first one also makes what is made once; there a microbatch may still take
// more than in the lesson. From then on it may not, and every action is checked: what the
// allocator has given out since the step began, less the weights' gradients that came, may not be
// more than the microbatches in flight take and the messages under way. How much of these a
// microbatch's own figure has depends on the step before: where its shapes were others, what was
// asked for goes as well. At the end nothing but gradients and what is handed to the caller may be
// left.
//
// What another part has moved or dropped counts as if it were there (Part::displaced): an Offload
// brings back when it likes, and has other plans in other steps. So the bound is that of a step
// without one, and who keeps a microbatch's graph is told of though its memory is elsewhere.
//
// A lesson may leave something: what a stage makes once, or once for each shape. Lessons that
// follow on each other and all leave something are a leak in a program whose shapes always change.
#pragma once

#include <tenure/core/meter.h>
#include <tenure/pipeline/bound.h>
#include <tenure/pipeline/lessons.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tenure::pipeline {

// What steps leave behind, one after another.
class Remains {
 public:
  enum class Step : uint8_t { lesson, checked };

  // A step ends with so many bytes more than it began with. Throws BudgetError, which says whose
  // they may be.
  void add(Step step, int64_t left, uint32_t rank, const char* whose);

 private:
  uint32_t lessons_ = 0;  // that left something, up to the last step
  int64_t bytes_ = 0;     // that they left
};

class Account {
 public:
  Account(const Schedule& schedule, uint32_t rank, c10::Device device);
  ~Account();
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;

  // The calling thread's CPU tensors are counted until the step ends or is dropped, and no others.
  // `parameters` are those whose gradients do not count.
  void begin(const std::vector<at::Tensor>& parameters);
  // Others, of which the step's first microbatch tells: of a loss, or a batch that wants one.
  void add_leaves(const std::vector<at::Tensor>& leaves);
  // Right before a stage runs, with what it was given in place, of which so many bytes are nobody
  // else's.
  void before(int64_t given);
  // `shapes` is a number for all those of the step so far, `messages` are bytes of receive buffers,
  // of tensors on their way out and of what goes to the caller. Throws BudgetError.
  void after(size_t position, const Action& action, uint64_t shapes, int64_t messages);
  // `handed_out` are bytes that go to the caller. Throws BudgetError.
  void end(int64_t handed_out);
  // The same around a step without backwards, of which no action is checked.
  void begin_evaluation();
  void end_evaluation(uint64_t shapes, int64_t handed_out);
  // The step failed.
  void drop();

  // Of a microbatch on each stage of the rank; nothing before the first step has ended.
  const std::vector<MicrobatchBytes>& learned() const { return lessons_.bytes(); }
  // The most that the schedule allows for microbatches in flight; 0 before a step has shown it.
  int64_t bound() const { return lessons_.highest(); }
  // On the device, above the begin of the step, gradients not counted: between actions, and at any
  // moment.
  int64_t peak_between() const { return peak_between_; }
  int64_t peak() const { return peak_; }
  // Of these, the most that messages had between two actions.
  int64_t most_messages() const { return most_messages_; }

 private:
  // Bytes since the step began, its gradients apart.
  struct Level {
    int64_t there = 0;  // on the device
    int64_t whole = 0;  // with what was displaced
  };
  struct Reading {
    Meter::Reading there;
    int64_t displaced = 0;
  };

  // A tensor whose gradient does not count; it may die meanwhile.
  using Leaf = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  int64_t rounding() const;
  const char* whose() const;
  void learn(const Action& action, int64_t now, int64_t messages);
  int64_t gradient_bytes() const;
  void stop();
  Reading read();
  Level level();

  uint32_t rank_;
  std::optional<OwnCount> own_;  // on the CPU
  std::optional<OwnCount::Here> here_;
  std::optional<Meter> meter_;  // elsewhere
  c10::Device device_;
  std::vector<uint32_t> stages_;
  std::unordered_map<const c10::TensorImpl*, Leaf> leaves_;  // during a step
  Lessons lessons_;
  std::vector<MicrobatchBytes> learning_;
  Remains of_training_;
  Remains of_evaluation_;
  std::unordered_set<uint64_t> evaluated_;  // shapes
  bool over_lesson_ = false;                // it settles, and has taken more than the lesson
  Reading at_start_;
  int64_t gradients_at_start_ = 0;
  int64_t before_ = 0;
  int64_t peak_between_ = 0;
  int64_t peak_ = 0;
  int64_t most_messages_ = 0;
};

}  // namespace tenure::pipeline
