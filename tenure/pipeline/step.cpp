#include <tenure/pipeline/step.h>

#include <tenure/core/error.h>
#include <tenure/core/release.h>
#include <tenure/core/text.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

namespace tenure::pipeline {
namespace {

c10::Device device_of(const std::vector<std::unique_ptr<Stage>>& stages) {
  for (const auto& stage : stages) {
    if (const auto parameters = stage->parameters(); !parameters.empty()) {
      return parameters.front().device();
    }
  }
  return c10::kCPU;
}

bool shares_storage(const at::Tensor& tensor, const std::vector<Alias>& aliases) {
  return tensor.has_storage() && std::ranges::any_of(aliases, [&](const Alias& alias) {
           return alias.lease().storage().is_alias_of(tensor.storage());
         });
}

// A stage that keeps what it returns, as a buffer, may write to it for the next microbatch before
// anybody has read it. What has a gradient it cannot write to. REQUIRES: nobody here has another
// reference.
bool may_be_written(const at::Tensor& output) {
  return !output.requires_grad() && output.layout() == c10::kStrided && output.has_storage() &&
         (output.use_count() > 1 || output.storage().use_count() > 1);
}

}  // namespace

StepResult Pipeline::Step::run() {
  state_.channel.begin(state_.step, trains(), plan_.messages.send_slots);
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

void Pipeline::Step::refuse(const std::string& why) {
  state_.channel.begin(state_.step, trains(), plan_.messages.send_slots);
  give_up(failure_here(why));
}

void Pipeline::Step::begin() {
  const auto device = device_of(state_.stages);
  state_.channel.receive_on(device);
  state_.stats.most_in_flight = {};
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
}

void Pipeline::Step::end_account() {
  if (!state_.account) {
    return;
  }
  if (trains()) {
    state_.account->end(handed_out());
  } else {
    state_.account->end_evaluation(shapes_, handed_out());
  }
}

Failure Pipeline::Step::failure_here(std::string what) const {
  Failure out;
  out.rank = state_.channel.rank();
  out.before_actions = !begun_;
  out.text = std::move(what);
  if (position_ < actions().size()) {
    out.action = actions()[position_];
  }
  return out;
}

void Pipeline::Step::run_action() {
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
  if (state_.account) {
    drop_casts();
  }
  if (!accounted()) {
    return;
  }
  state_.account->after(position_, action, shapes_,
                        state_.channel.held_bytes() + state_.channel.sending_bytes() +
                            handed_.gradient_bytes() + handed_out());
}

// Strict counts what a microbatch takes, so each casts its weights itself: what autocast keeps of
// them would stay until the caller's block ends.
void Pipeline::Step::drop_casts() const {
  const auto device = state_.channel.device().type();
  if (at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device) &&
      at::autocast::is_autocast_cache_enabled()) {
    at::autocast::clear_cache();
  }
}

void Pipeline::Step::before_stage() {
  state_.channel.settle();
  if (accounted()) {
    state_.account->before(std::exchange(handed_in_, 0));
  }
}

InFlight Pipeline::Step::in_flight_now() const {
  InFlight out;
  for (const auto& [key, of] : flights_) {
    ++(of.waits ? out.waiting : out.whole);
  }
  return out;
}

void Pipeline::Step::count_in_flight() {
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

void Pipeline::Step::end_microbatch(const Action& action) {
  auto of = flights_.extract({action.stage, action.microbatch});
  for (const auto& input : of.mapped().received) {
    const auto tensor = input.tensor();
    if (is_released(tensor.storage()) || tensor.nbytes() == 0) {
      continue;  // several inputs may have one storage
    }
    state_.channel.finish_readers(tensor);
    release_storage(tensor, {.name = text("pipeline, at the end of microbatch ", action.microbatch,
                                          " on stage ", action.stage),
                             .site = {}});
  }
  of.mapped() = {};
  const auto last = std::ranges::none_of(
      flights_, [&](const auto& entry) { return entry.first.second == action.microbatch; });
  if (last && is_over(action.microbatch)) {
    scopes_.close(action.microbatch);
  }
}

bool Pipeline::Step::is_over(uint32_t microbatch) const {
  return std::none_of(actions().begin() + static_cast<std::ptrdiff_t>(position_) + 1,
                      actions().end(),
                      [&](const Action& action) { return action.microbatch == microbatch; });
}

std::vector<Sent> Pipeline::Step::given(const Action& action, std::vector<Alias>& leases) {
  if (const auto& need = plan_.messages.steps[position_].need) {
    took_here_ = true;  // whether it comes or not
    auto received = state_.channel.take(*need, scopes_.of(action.microbatch), leases);
    if (action.kind == Kind::forward) {
      shares_.learn(action.microbatch, received.share);
    }
    note_shapes(received.tensors);
    return std::move(received.tensors);
  }
  const auto cargo = action.kind == Kind::forward ? Cargo::activations : Cargo::gradients;
  auto handed = handed_.take(cargo, action.stage, action.microbatch);
  handed_in_ = handed.gradient_bytes;
  return std::move(handed.tensors);
}

void Pipeline::Step::note_shapes(const std::vector<Sent>& tensors) {
  if (!state_.account) {
    return;
  }
  const auto note = [&](auto number) {
    shapes_ = c10::hash_combine(shapes_, static_cast<size_t>(number));
  };
  note(tensors.size());
  for (const auto& sent : tensors) {
    note(sent.gradient);
    if (!sent.tensor.defined()) {
      note(-1);
      continue;
    }
    note(sent.tensor.scalar_type());
    note(sent.tensor.dim());
    std::ranges::for_each(sent.tensor.sizes(), note);
  }
}

void Pipeline::Step::pass_on(const Action& action, const std::vector<Sent>& tensors) {
  note_shapes(tensors);
  if (const auto& send = plan_.messages.steps[position_].send) {
    // It may outlive its microbatch: until it is sent it is the step's.
    state_.channel.send(*send, tensors, shares_.of(action.microbatch), scope_.id());
    sent_here_ = true;
    return;
  }
  const auto forward = action.kind == Kind::forward;
  handed_.put(forward ? Cargo::activations : Cargo::gradients,
              forward ? action.stage + 1 : action.stage - 1, action.microbatch, tensors,
              scopes_.of(action.microbatch));
}

void Pipeline::Step::run_forward(const Action& action) {
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

at::Tensor Pipeline::Step::to_pass_on(const at::Tensor& output, const Flight& of) const {
  if (!output.defined()) {
    return output;
  }
  const auto received = shares_storage(output, of.received);
  const auto stays = trains() && plan_.messages.steps[position_].send;
  const auto copies = received ? !stays : may_be_written(output);
  return copies ? output.detach().clone() : output.detach();
}

std::vector<at::Tensor> Pipeline::Step::finished(const Action& action,
                                                 std::vector<at::Tensor> outputs,
                                                 const Flight& of) {
  if (!schedule_.is_last(action.stage)) {
    return outputs;
  }
  if (!loss_) {
    for (auto& output : outputs) {
      const auto copies =
          output.defined() && (shares_storage(output, of.received) || may_be_written(output));
      output = copies ? output.clone() : output;
    }
    result_.outputs.push_back(outputs);
    return {};
  }
  shares_.check_target(action.microbatch);
  auto loss = loss_(action.microbatch, outputs);
  if (!loss.defined() || loss.numel() != 1) {
    throw InputError(text(
        "the loss of a microbatch must be one number, and it is ",
        loss.defined() ? text("a tensor of ", loss.numel(), " elements") : std::string("nothing"),
        ": take its mean or sum"));
  }
  if (loss.is_complex()) {
    throw InputError("the loss of a microbatch must be a real number, and it is complex");
  }
  if (trains() && !loss.requires_grad()) {
    throw InputError(
        "the loss of a microbatch has no gradient, so that nothing would be trained: is it "
        "detached, found without gradients, or of parameters that are all frozen?");
  }
  loss = loss.dim() == 0 ? loss : loss.reshape({});
  const at::NoGradGuard no_grad;
  const auto part = loss.detach().mul(shares_.weight_of(action.microbatch));
  result_.loss = result_.loss.defined() ? result_.loss.add(part) : part;
  return {std::move(loss)};
}

std::vector<at::Tensor> Pipeline::Step::gradients_for(const Action& action,
                                                      std::vector<Alias>& leases) {
  if (schedule_.is_last(action.stage)) {
    return {at::full_like(result_.loss, shares_.weight_of(action.microbatch))};
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

void Pipeline::Step::run_backward(const Action& action) {
  auto& of = flight(action);
  std::vector<Alias> received;
  auto gradients = gradients_for(action, received);
  before_stage();
  received.clear();  // whoever needs them on has them
  const auto scope = scopes_.of(action.microbatch);
  const auto early = leaves_early(action);
  const auto halves = !early                              ? Halves::always
                      : position_ + 1 == actions().size() ? Halves::if_plain
                                                          : Halves::last_if_plain;
  auto found =
      action.kind == Kind::backward && !early
          ? of.backward.run(gradients)
          : of.backward.run_inputs(
                gradients,
                intern_owner(OwnerKind::gradient, text("kept for weights of stage ", action.stage)),
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

bool Pipeline::Step::leaves_early(const Action& action) const {
  return action.kind == Kind::backward && plan_.messages.steps[position_].send &&
         plan_.in_flight.all() == 1 && state_.channel.device().is_cpu();
}

void Pipeline::Step::run_weights(const Action& action) {
  before_stage();
  flight(action).backward.run_weights();
  end_microbatch(action);
}

int64_t Pipeline::Step::handed_out() const {
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

void Pipeline::Step::give_up(const Failure& failure) {
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
  scopes_.drop();
}

}  // namespace tenure::pipeline
