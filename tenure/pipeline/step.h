// Step: one step of one rank, its actions in turn, and what the rank keeps for the next one. One
// thread.
#pragma once

#include <tenure/core/alias.h>
#include <tenure/core/scope.h>
#include <tenure/pipeline/account.h>
#include <tenure/pipeline/backward.h>
#include <tenure/pipeline/bound.h>
#include <tenure/pipeline/channel.h>
#include <tenure/pipeline/handed.h>
#include <tenure/pipeline/messages.h>
#include <tenure/pipeline/microbatch_scopes.h>
#include <tenure/pipeline/pipeline.h>
#include <tenure/pipeline/shares.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tenure::pipeline {

// A schedule with what follows from it for one rank.
struct Plan {
  Plan(Schedule of, uint32_t rank)
      : schedule(std::move(of)),
        messages(plan_messages(schedule, rank)),
        in_flight(most_in_flight(schedule, rank)) {}

  Schedule schedule;
  MessagePlan messages;
  InFlight in_flight;
};

// What there is of a microbatch on a stage between its actions.
struct Flight {
  std::vector<Alias> received;  // inputs that came from another rank
  Backward backward;
  bool waits = false;  // for the gradients of the weights alone
};

// What a rank keeps from step to step.
struct Pipeline::State {
  State(Schedule schedule, std::vector<std::unique_ptr<Stage>> given, Groups groups,
        Options chosen);

  Stage& stage(uint32_t number);
  std::vector<at::Tensor> parameters() const;

  Channel channel;
  std::vector<std::unique_ptr<Stage>> stages;
  Plan training;
  Plan evaluating;
  Options options;
  std::vector<uint32_t> own_stages;
  std::unique_ptr<Account> account;  // strict, once a step has shown the device
  Stats stats;
  uint64_t step = 0;
  std::string failed_in;
};

class Pipeline::Step {
 public:
  Step(State& state, Pass pass, const Loss& loss, const Given& given)
      : state_(state),
        plan_(pass == Pass::train ? state.training : state.evaluating),
        schedule_(plan_.schedule),
        pass_(pass),
        loss_(loss),
        shares_(schedule_.microbatches, given.batch_rows, given.target_rows),
        shapes_(given.shapes),
        scope_("pipeline", static_cast<int64_t>(state.step), OnClose::report) {}

  // All of its actions.
  StepResult run();
  // Tells the other ranks that this one does not come.
  void refuse(const std::string& why);

 private:
  const std::vector<Action>& actions() const { return schedule_.actions[state_.channel.rank()]; }
  bool trains() const { return pass_ == Pass::train; }
  bool accounted() const { return state_.account != nullptr && trains(); }
  void begin();
  void end_account();
  Failure failure_here(const char* what) const { return failure_here(std::string(what)); }
  Failure failure_here(std::string what) const;
  void run_action();
  // Right before a stage runs, with what it was given in place: what is sent by now is not there
  // beside what it makes.
  void before_stage();
  // Of the graphs that there are, whatever the schedule says.
  InFlight in_flight_now() const;
  void count_in_flight();
  Flight& flight(const Action& action) { return flights_[{action.stage, action.microbatch}]; }
  void end_microbatch(const Action& action);
  // Whether this rank does nothing more for a microbatch.
  bool is_over(uint32_t microbatch) const;
  // What a stage is given: from another rank, from a stage of this one, or nothing.
  std::vector<Sent> given(const Action& action, std::vector<Alias>& leases);
  void note_shapes(const std::vector<Sent>& tensors);
  void pass_on(const Action& action, const std::vector<Sent>& tensors);
  void run_forward(const Action& action);
  // Without its graph. What a stage was sent and hands on unchanged would go with its microbatch: a
  // copy where that may be before it has been read, by another stage of this rank, or in an
  // evaluation by the rank that it is sent to. A copy, too, of what it may write to until then.
  at::Tensor to_pass_on(const at::Tensor& output, const Flight& of) const;
  // The last stage's outputs become the loss, or the caller's.
  std::vector<at::Tensor> finished(const Action& action, std::vector<at::Tensor> outputs,
                                   const Flight& of);
  // The gradients of a stage's outputs.
  std::vector<at::Tensor> gradients_for(const Action& action, std::vector<Alias>& leases);
  void run_backward(const Action& action);
  // See Note [A gradient leaves early]. On a device the host would have more to launch, which has
  // not been measured.
  bool leaves_early(const Action& action) const;
  void run_weights(const Action& action);
  void drop_casts() const;
  int64_t handed_out() const;
  void give_up(const Failure& failure);

  State& state_;
  const Plan& plan_;
  const Schedule& schedule_;
  Pass pass_;
  const Loss& loss_;
  Shares shares_;
  uint64_t shapes_;  // of all that was given, or came or went so far
  Scope scope_;
  bool begun_ = false;
  size_t position_ = 0;
  bool took_here_ = false;
  bool sent_here_ = false;
  StepResult result_;
  MicrobatchScopes scopes_;
  std::map<std::pair<uint32_t, uint32_t>, Flight> flights_;  // by stage and microbatch
  Handed handed_;
  int64_t handed_in_ = 0;  // bytes of the gradients that this action was handed
};

}  // namespace tenure::pipeline
