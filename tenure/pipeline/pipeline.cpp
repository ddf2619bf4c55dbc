#include <tenure/pipeline/pipeline.h>

#include <tenure/core/error.h>
#include <tenure/core/part.h>
#include <tenure/core/text.h>
#include <tenure/pipeline/check.h>
#include <tenure/pipeline/step.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

namespace tenure::pipeline {
namespace {

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

}  // namespace

Pipeline::State::State(Schedule schedule, std::vector<std::unique_ptr<Stage>> given, Groups groups,
                       Options chosen)
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

Stage& Pipeline::State::stage(uint32_t number) {
  const auto at = std::ranges::find(own_stages, number) - own_stages.begin();
  return *stages[static_cast<size_t>(at)];
}

std::vector<at::Tensor> Pipeline::State::parameters() const {
  std::vector<at::Tensor> out;
  for (const auto& stage : stages) {
    std::ranges::copy(stage->parameters(), std::back_inserter(out));
  }
  return out;
}

Pipeline::Pipeline(Schedule schedule, std::vector<std::unique_ptr<Stage>> stages, Groups groups,
                   Options options)
    : state_(std::make_unique<State>(std::move(schedule), std::move(stages), std::move(groups),
                                     options)) {}

Pipeline::~Pipeline() = default;

StepResult Pipeline::step(Pass pass, const Loss& loss, const Given& given) {
  ++state_->step;
  const auto sent_before = state_->channel.stats().sent_bytes;
  auto out = Step(*state_, pass, loss, given).run();
  ++state_->stats.steps;
  figures().add(state_->channel.stats().sent_bytes - sent_before,
                state_->account ? state_->account->bound() : 0);
  return out;
}

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
