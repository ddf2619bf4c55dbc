#include <tenure/pipeline/pipeline.h>

#include <tenure/core/error.h>
#include <tenure/core/names.h>
#include <tenure/core/part.h>
#include <tenure/core/release.h>
#include <tenure/core/scope.h>
#include <tenure/core/text.h>
#include <tenure/pipeline/account.h>
#include <tenure/pipeline/backward.h>
#include <tenure/pipeline/check.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace tenure::pipeline {
namespace {

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

OwnerId owner_named(OwnerKind kind, const char* what, uint32_t stage) {
  return intern_owner(kind, text(what, " of stage ", stage));
}

c10::Device device_of(const std::vector<std::unique_ptr<Stage>>& stages) {
  for (const auto& stage : stages) {
    if (const auto parameters = stage->parameters(); !parameters.empty()) {
      return parameters.front().device();
    }
  }
  return c10::kCPU;
}

// What the part tells others of all pipelines of the process.
struct Figures {
  std::atomic<int64_t> steps = 0;
  std::atomic<int64_t> sent_bytes = 0;
  std::atomic<int64_t> bound_bytes = 0;  // of the pipeline that ran last; 0: not known
  PartRegistration registration;

  Figures()
      : registration(register_part({.name = "pipeline",
                                    .kinds = {OwnerKind::activation, OwnerKind::gradient,
                                              OwnerKind::receive_buffer, OwnerKind::communication},
                                    .stats = [this] {
                                      return std::vector<std::pair<std::string, int64_t>>{
                                          {"steps", steps.load()},
                                          {"sent_bytes", sent_bytes.load()},
                                          {"bound_bytes", bound_bytes.load()}};
                                    }})) {}
  void add(uint64_t sent, int64_t bound) {
    bound_bytes = bound;
    steps.fetch_add(1);
    sent_bytes.fetch_add(static_cast<int64_t>(sent));
  }
};

Figures& figures() {
  static auto* all = new Figures;
  return *all;
}

// What there is of a microbatch on a stage between its actions.
struct Flight {
  std::vector<Alias> received;  // inputs that came from another rank
  Backward backward;
  bool waits = false;  // for the gradients of the weights alone
};

// Tensors for a stage of the same rank.
struct Handed {
  std::vector<Alias> tensors;
  std::vector<Spec::Gradient> gradients;
};

bool shares_storage(const at::Tensor& tensor, const std::vector<Alias>& aliases) {
  return std::ranges::any_of(aliases, [&](const Alias& alias) {
    return alias.lease().storage().is_alias_of(tensor.storage());
  });
}

}  // namespace

struct Pipeline::State {
  State(Schedule schedule, std::vector<std::unique_ptr<Stage>> given, Groups groups, Options chosen)
      : channel(std::move(groups), schedule.microbatches, chosen.timeout),
        stages(std::move(given)),
        training((check(schedule), std::move(schedule)), channel.rank()),
        evaluating(forward_only(training.schedule), channel.rank()),
        options(chosen),
        own_stages(training.schedule.stages_of(channel.rank())) {
    if (training.schedule.ranks() != channel.ranks()) {
      throw InputError(text("the schedule is for ", count_text(training.schedule.ranks(), "rank"),
                            ", the group has ", channel.ranks()));
    }
    if (own_stages.size() != stages.size()) {
      throw InputError(text("schedule '", training.schedule.name, "' has ",
                            count_text(own_stages.size(), "stage"), " on rank ", channel.rank(),
                            ", and it was given ", stages.size()));
    }
  }

  Stage& stage(uint32_t number) {
    const auto at = std::ranges::find(own_stages, number) - own_stages.begin();
    return *stages[static_cast<size_t>(at)];
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> out;
    for (const auto& stage : stages) {
      std::ranges::copy(stage->parameters(), std::back_inserter(out));
    }
    return out;
  }

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
  bool new_shapes = false;  // of what the next step is given
};

// One step of one rank.
class Pipeline::Step {
 public:
  Step(State& state, Pass pass, const Loss& loss, const Rows& rows)
      : state_(state),
        plan_(pass == Pass::train ? state.training : state.evaluating),
        schedule_(plan_.schedule),
        pass_(pass),
        loss_(loss),
        shares_(shares_of(rows.batch)),
        of_target_(shares_of(rows.target)),
        scope_("pipeline", static_cast<int64_t>(state.step), OnClose::report) {}

  StepResult run() {
    state_.channel.begin(state_.step, plan_.messages.send_slots);
    try {
      begin();
      begun_ = true;
      for (; position_ < actions().size(); ++position_) {
        run_action();
      }
      state_.channel.finish();
      end_account();
    } catch (const PeerFailed& peer) {
      give_up(peer.failure);
      throw CollectiveError(peer.failure.words());
    } catch (const std::exception& error) {
      give_up(failure_here(error.what()));
      throw;
    } catch (...) {
      give_up(failure_here("an error of no known kind"));
      throw;
    }
    if (const auto late = state_.channel.end()) {
      throw CollectiveError(text("in the step before this one ", late->words(),
                                 ". This rank had ended that step, so its weights may be a step "
                                 "ahead: go on from a checkpoint, or from weights of one step"));
    }
    return std::move(result_);
  }

  // Tells the other ranks that this one does not come.
  void refuse(const std::string& why) {
    state_.channel.begin(state_.step, plan_.messages.send_slots);
    give_up(failure_here(why));
  }

 private:
  const std::vector<Action>& actions() const { return schedule_.actions[state_.channel.rank()]; }
  bool trains() const { return pass_ == Pass::train; }
  bool accounted() const { return state_.account != nullptr && trains(); }
  bool shapes_changed() const { return state_.channel.stats().changed != changed_before_; }

  void begin() {
    const auto device = device_of(state_.stages);
    state_.channel.receive_on(device);
    const auto new_shapes = std::exchange(state_.new_shapes, false);
    state_.stats.most_in_flight = {};
    changed_before_ = state_.channel.stats().changed;
    if (state_.options.strict == Strict::off) {
      return;
    }
    if (!state_.account) {
      state_.account =
          std::make_unique<Account>(state_.training.schedule, state_.channel.rank(), device);
    }
    if (trains()) {
      state_.account->begin(state_.parameters());
    } else {
      state_.account->begin_evaluation();
    }
    if (new_shapes) {
      state_.account->shapes_changed();
    }
  }

  void end_account() {
    if (!state_.account) {
      return;
    }
    if (shapes_changed()) {
      state_.account->shapes_changed();
    }
    if (trains()) {
      state_.account->end(handed_out());
    } else {
      state_.account->end_evaluation(handed_out());
    }
  }

  Failure failure_here(const char* what) const { return failure_here(std::string(what)); }
  Failure failure_here(std::string what) const {
    Failure out;
    out.rank = state_.channel.rank();
    out.before_actions = !begun_;
    out.text = std::move(what);
    if (position_ < actions().size()) {
      out.action = actions()[position_];
    }
    return out;
  }

  void run_action() {
    const auto& action = actions()[position_];
    took_here_ = false;
    sent_here_ = false;
    for (const auto& message : plan_.messages.steps[position_].post) {
      state_.channel.post(message);
    }
    switch (action.kind) {
      case Kind::forward:
        run_forward(action);
        break;
      case Kind::backward:
      case Kind::input_backward:
        run_backward(action);
        break;
      case Kind::weight_backward:
        run_weights(action);
        break;
    }
    count_in_flight();
    if (!accounted()) {
      return;
    }
    if (shapes_changed()) {
      state_.account->shapes_changed();
    }
    state_.account->after(
        position_, action,
        state_.channel.held_bytes() + state_.channel.sending_bytes() + handed_out());
  }

  // Right before a stage runs, with what it was given in place: what is sent by now is not there
  // beside what it makes.
  void before_stage() {
    state_.channel.settle();
    if (accounted()) {
      state_.account->before();
    }
  }

  // Of the graphs that there are, whatever the schedule says.
  InFlight in_flight_now() const {
    InFlight out;
    for (const auto& [key, of] : flights_) {
      ++(of.waits ? out.waiting : out.whole);
    }
    return out;
  }

  void count_in_flight() {
    const auto now = in_flight_now();
    auto& most = state_.stats.most_in_flight;
    if (now.all() > most.all() || (now.all() == most.all() && now.whole > most.whole)) {
      most = now;
    }
    if (now.all() > plan_.in_flight.all()) {
      throw BudgetError(text("rank ", state_.channel.rank(), " of the pipeline has ", now.all(),
                             " microbatches in flight, and its schedule allows ",
                             plan_.in_flight.all()));
    }
  }

  // Everything of a microbatch on this rank is leased in a scope of its own.
  ScopeId scope_of(uint32_t microbatch) {
    auto [found, is_new] = scopes_.try_emplace(microbatch, ScopeId::process);
    if (is_new) {
      static const auto name = intern("microbatch");
      found->second = open_scope({.name = name, .count = microbatch}, OnClose::report);
    }
    return found->second;
  }

  Flight& flight(const Action& action) { return flights_[{action.stage, action.microbatch}]; }

  void end_microbatch(const Action& action) {
    auto of = flights_.extract({action.stage, action.microbatch});
    for (const auto& input : of.mapped().received) {
      const auto tensor = input.tensor();
      if (is_released(tensor.storage()) || tensor.nbytes() == 0) {
        continue;  // several inputs may have one storage
      }
      state_.channel.finish_readers(tensor);
      release_storage(tensor, {.name = text("pipeline, at the end of microbatch ",
                                            action.microbatch, " on stage ", action.stage),
                               .site = {}});
    }
    of.mapped() = {};
    const auto last = std::ranges::none_of(
        flights_, [&](const auto& entry) { return entry.first.second == action.microbatch; });
    if (last && is_over(action.microbatch)) {
      close_microbatch(action.microbatch, Ending::normal);
    }
  }

  // Whether this rank does nothing more for a microbatch.
  bool is_over(uint32_t microbatch) const {
    return std::none_of(actions().begin() + static_cast<std::ptrdiff_t>(position_) + 1,
                        actions().end(),
                        [&](const Action& action) { return action.microbatch == microbatch; });
  }

  void close_microbatch(uint32_t microbatch, Ending ending) {
    if (const auto found = scopes_.find(microbatch); found != scopes_.end()) {
      const auto id = found->second;
      scopes_.erase(found);
      if (const auto left = close_scope(id, ending); ending == Ending::normal && !left.empty()) {
        throw ScopeError(left.text());
      }
    }
  }

  // What a stage is given: from another rank, from a stage of this one, or nothing.
  std::vector<Sent> given(const Action& action, std::vector<Alias>& leases) {
    if (const auto& need = plan_.messages.steps[position_].need) {
      took_here_ = true;  // whether it comes or not
      auto received = state_.channel.take(*need, scope_of(action.microbatch), leases);
      if (action.kind == Kind::forward) {
        shares_[action.microbatch] = received.share;
      }
      return std::move(received.tensors);
    }
    const auto cargo = action.kind == Kind::forward ? Cargo::activations : Cargo::gradients;
    auto handed = handed_.extract({cargo, action.stage, action.microbatch});
    std::vector<Sent> out;
    if (handed.empty()) {
      return out;
    }
    const auto& what = handed.mapped();
    for (size_t i = 0; i < what.tensors.size(); ++i) {
      const auto& alias = what.tensors[i];
      out.push_back({alias.defined() ? alias.tensor() : at::Tensor(), what.gradients[i]});
    }
    return out;
  }

  void pass_on(const Action& action, const std::vector<Sent>& tensors) {
    if (const auto& send = plan_.messages.steps[position_].send) {
      // It may outlive its microbatch: until it is sent it is the step's.
      state_.channel.send(*send, tensors, shares_[action.microbatch], scope_.id());
      sent_here_ = true;
      return;
    }
    const auto scope = scope_of(action.microbatch);
    const auto forward = action.kind == Kind::forward;
    const auto next = forward ? action.stage + 1 : action.stage - 1;
    auto& handed =
        handed_[{forward ? Cargo::activations : Cargo::gradients, next, action.microbatch}];
    const auto owner =
        owner_named(forward ? OwnerKind::activation : OwnerKind::gradient, "input", next);
    for (const auto& sent : tensors) {
      handed.tensors.push_back(sent.tensor.defined() ? Alias(sent.tensor, owner, scope) : Alias());
      handed.gradients.push_back(sent.gradient);
    }
  }

  void run_forward(const Action& action) {
    auto& of = flight(action);
    std::vector<at::Tensor> inputs;
    for (const auto& sent : given(action, of.received)) {
      inputs.push_back(sent.tensor);
      if (trains() && sent.gradient == Spec::Gradient::wanted) {
        inputs.back().requires_grad_(true);
      }
    }
    before_stage();
    auto outputs = [&] {
      const at::AutoGradMode mode(trains() && at::GradMode::is_enabled());
      return finished(action, state_.stage(action.stage).forward(action.microbatch, inputs), of);
    }();
    if (trains()) {
      of.backward = Backward(inputs, outputs);
      if (accounted()) {
        state_.account->add_leaves(of.backward.leaves());
      }
    }
    inputs.clear();
    if (!schedule_.is_last(action.stage)) {
      std::vector<Sent> sent;
      for (const auto& output : outputs) {
        sent.push_back({output, output.defined() && output.requires_grad() ? Spec::Gradient::wanted
                                                                           : Spec::Gradient::none});
      }
      outputs.clear();
      for (auto& one : sent) {
        one.tensor = to_pass_on(one.tensor, of);
      }
      pass_on(action, sent);
    }
    if (!trains()) {
      end_microbatch(action);
    }
  }

  // Without its graph. What a stage was sent and hands on unchanged would go with its microbatch: a
  // copy where that may be before it has been read, by another stage of this rank, or in an
  // evaluation by the rank that it is sent to.
  at::Tensor to_pass_on(const at::Tensor& output, const Flight& of) const {
    if (!output.defined()) {
      return output;
    }
    const auto stays = trains() && plan_.messages.steps[position_].send;
    const auto out = output.detach();
    return !stays && shares_storage(out, of.received) ? out.clone() : out;
  }

  // The last stage's outputs become the loss, or the caller's.
  std::vector<at::Tensor> finished(const Action& action, std::vector<at::Tensor> outputs,
                                   const Flight& of) {
    if (!schedule_.is_last(action.stage)) {
      return outputs;
    }
    if (!loss_) {
      for (auto& output : outputs) {
        output = output.defined() && shares_storage(output, of.received) ? output.clone() : output;
      }
      result_.outputs.push_back(outputs);
      return {};
    }
    check_target(action.microbatch);
    auto loss = loss_(action.microbatch, outputs);
    if (!loss.defined() || loss.numel() != 1) {
      throw InputError(text(
          "the loss of a microbatch must be one number, and it is ",
          loss.defined() ? text("a tensor of ", loss.numel(), " elements") : std::string("nothing"),
          ": take its mean or sum"));
    }
    if (trains() && !loss.requires_grad()) {
      throw InputError(
          "the loss of a microbatch has no gradient, so that nothing would be trained: is it "
          "detached, found without gradients, or of parameters that are all frozen?");
    }
    loss = loss.dim() == 0 ? loss : loss.reshape({});
    const at::NoGradGuard no_grad;
    const auto part = loss.detach().mul(weight_of(action.microbatch));
    result_.loss = result_.loss.defined() ? result_.loss.add(part) : part;
    return {std::move(loss)};
  }

  std::vector<Share> shares_of(const std::vector<int64_t>& rows) const {
    std::vector<Share> out(schedule_.microbatches);
    const auto all = std::reduce(rows.begin(), rows.end());
    for (size_t i = 0; i < rows.size(); ++i) {
      out.at(i) = {.rows = rows[i], .of = all};
    }
    return out;
  }

  // In the loss: a mean over the batch's rows is made of those over its microbatches'.
  double weight_of(uint32_t microbatch) const {
    for (const auto* shares : {&shares_, &of_target_}) {
      if (const auto& share = (*shares)[microbatch]; share.of > 0) {
        return static_cast<double>(share.rows) / static_cast<double>(share.of);
      }
    }
    return 1.0 / schedule_.microbatches;
  }

  void check_target(uint32_t microbatch) const {
    const auto& own = of_target_[microbatch];
    const auto& batch = shares_[microbatch];
    if (own.of > 0 && batch.of > 0 && own.rows * batch.of != batch.rows * own.of) {
      throw InputError(text("the target has ", own.of, " rows and the batch ", batch.of,
                            ", so that microbatch ", microbatch, " has ", own.rows,
                            " of the target's and ", batch.rows,
                            " of the batch's: pass a target with the rows of the batch, and let "
                            "the loss know of itself "
                            "what has none"));
    }
  }

  // The gradients of a stage's outputs.
  std::vector<at::Tensor> gradients_for(const Action& action, std::vector<Alias>& leases) {
    if (schedule_.is_last(action.stage)) {
      return {at::full_like(result_.loss, weight_of(action.microbatch))};
    }
    std::vector<at::Tensor> out;
    for (auto& sent : given(action, leases)) {
      out.push_back(std::move(sent.tensor));
    }
    // Whoever has a gradient of an output has received the output.
    if (const auto forward = made_by(
            schedule_,
            {.stage = action.stage, .microbatch = action.microbatch, .kind = Kind::forward})) {
      state_.channel.finish(*forward);
    }
    return out;
  }

  void run_backward(const Action& action) {
    auto& of = flight(action);
    std::vector<Alias> received;
    auto gradients = gradients_for(action, received);
    before_stage();
    received.clear();  // whoever needs them on has them
    const auto scope = scope_of(action.microbatch);
    const auto early = leaves_early(action);
    const auto halves = !early                              ? Halves::always
                        : position_ + 1 == actions().size() ? Halves::if_plain
                                                            : Halves::last_if_plain;
    auto found =
        action.kind == Kind::backward && !early
            ? of.backward.run(gradients)
            : of.backward.run_inputs(
                  gradients, owner_named(OwnerKind::gradient, "kept for weights", action.stage),
                  scope, halves);
    of.waits = action.kind == Kind::input_backward;
    gradients.clear();
    if (action.stage > 0) {
      std::vector<Sent> sent;
      for (auto& gradient : found) {
        sent.push_back({std::move(gradient), Spec::Gradient::none});
      }
      found.clear();
      pass_on(action, sent);
    }
    if (early) {
      of.backward.run_weights();
    }
    if (ends_microbatch(action.kind)) {
      end_microbatch(action);
    }
  }

  // See Note [A gradient leaves early]. On a device the host would have more to launch, which has
  // not been measured.
  bool leaves_early(const Action& action) const {
    return action.kind == Kind::backward && plan_.messages.steps[position_].send &&
           plan_.in_flight.all() == 1 && state_.channel.device().is_cpu();
  }

  void run_weights(const Action& action) {
    before_stage();
    flight(action).backward.run_weights();
    end_microbatch(action);
  }

  int64_t handed_out() const {
    auto out = result_.loss.defined() ? static_cast<int64_t>(result_.loss.nbytes()) : 0;
    std::unordered_set<const void*> seen;
    for (const auto& outputs : result_.outputs) {
      for (const auto& output : outputs) {
        if (output.defined() && seen.insert(output.storage().unsafeGetStorageImpl()).second) {
          out += static_cast<int64_t>(output.storage().nbytes());
        }
      }
    }
    return out;
  }

  void give_up(const Failure& failure) {
    ++state_.stats.failed_steps;
    const auto here = failure.rank == state_.channel.rank() && position_ < actions().size();
    state_.failed_in = here && !failure.before_actions ? failure.action.words() : std::string();
    if (state_.account) {
      state_.account->drop();
    }
    result_ = {};
    handed_.clear();
    flights_.clear();
    std::vector<Message> unmade;
    std::vector<Message> unneeded;
    for (auto i = position_; i < actions().size(); ++i) {
      const auto& messages = plan_.messages.steps[i];
      if (messages.send && (i != position_ || !sent_here_)) {
        unmade.push_back(*messages.send);
      }
      if (messages.need && (i != position_ || !took_here_)) {
        unneeded.push_back(*messages.need);
      }
    }
    state_.channel.abandon(failure, unmade, unneeded);
    while (!scopes_.empty()) {
      close_microbatch(scopes_.begin()->first, Ending::exception);
    }
  }

  State& state_;
  const Plan& plan_;
  const Schedule& schedule_;
  Pass pass_;
  const Loss& loss_;
  std::vector<Share> shares_;     // by microbatch; of others' once its forward has come
  std::vector<Share> of_target_;  // the same
  Scope scope_;
  bool begun_ = false;
  size_t position_ = 0;
  bool took_here_ = false;
  bool sent_here_ = false;
  uint64_t changed_before_ = 0;
  StepResult result_;
  std::map<uint32_t, ScopeId> scopes_;                              // by microbatch
  std::map<std::pair<uint32_t, uint32_t>, Flight> flights_;         // by stage and microbatch
  std::map<std::tuple<Cargo, uint32_t, uint32_t>, Handed> handed_;  // by stage and microbatch
};

Pipeline::Pipeline(Schedule schedule, std::vector<std::unique_ptr<Stage>> stages, Groups groups,
                   Options options)
    : state_(std::make_unique<State>(std::move(schedule), std::move(stages), std::move(groups),
                                     options)) {}

Pipeline::~Pipeline() = default;

StepResult Pipeline::step(Pass pass, const Loss& loss, const Rows& rows) {
  ++state_->step;
  const auto sent_before = state_->channel.stats().sent_bytes;
  auto out = Step(*state_, pass, loss, rows).run();
  ++state_->stats.steps;
  figures().add(state_->channel.stats().sent_bytes - sent_before,
                state_->account ? state_->account->bound() : 0);
  return out;
}

void Pipeline::shapes_change() { state_->new_shapes = true; }

void Pipeline::refuse(Pass pass, const std::string& why) {
  ++state_->step;
  Step(*state_, pass, {}, {}).refuse(why);
}

const std::string& Pipeline::failed_in() const { return state_->failed_in; }

const Schedule& Pipeline::schedule() const { return state_->training.schedule; }

uint32_t Pipeline::rank() const { return state_->channel.rank(); }

Promise Pipeline::promise() const {
  Promise out;
  out.in_flight = state_->training.in_flight;
  out.receives = state_->training.messages.most_posted;
  out.sends = state_->training.messages.send_slots;
  if (state_->account && !state_->account->learned().empty()) {
    out.microbatch = state_->account->learned();
    out.bytes = peak_bytes(schedule(), rank(), out.microbatch);
  }
  return out;
}

Stats Pipeline::stats() const {
  auto out = state_->stats;
  out.channel = state_->channel.stats();
  if (state_->account) {
    out.peak_bytes = state_->account->peak_between();
    out.highest_bytes = state_->account->peak();
    out.message_bytes = state_->account->most_messages();
  }
  return out;
}

}  // namespace tenure::pipeline
