#include <tenure/train/from_job.h>

#include <tenure/core/text.h>
#include <tenure/train/saved_weights.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <utility>

namespace tenure::train {
namespace {

// A copy has a name of its own in the optimizer, which knows each once.
std::string name_in_optimizer(const Parameters::Entry& entry) {
  return entry.is_copy ? entry.name + " (head)" : entry.name;
}

BatchOptions batches_of(const Job& job, int64_t data_rank) {
  return {.rows = job.rows,
          .length = job.length,
          .rank = data_rank,
          .ranks = job.dp,
          .seed = job.seed,
          .vocab = job.model.vocab};
}

}  // namespace

std::string described(const std::vector<LayerRange>& stages, const pipeline::Schedule& schedule,
                      uint32_t rank) {
  std::string out;
  const auto add = [&](const std::string& part) { out += text(out.empty() ? "" : ", ", part); };
  for (const auto number : schedule.stages_of(rank)) {
    const auto& range = stages.at(number);
    if (number == 0) {
      add("embedding");
    }
    add(range.size() == 1 ? text("layer ", range.first)
                          : text("layers ", range.first, "-", range.last - 1));
    if (schedule.is_last(number)) {
      add("head");
    }
  }
  return out;
}

pipeline::Schedule one_after_the_other(const pipeline::Schedule& like) {
  pipeline::Schedule out{
      .name = "sample", .microbatches = 1, .rank_of_stage = like.rank_of_stage, .actions = {}};
  out.actions.resize(like.ranks());
  for (uint32_t stage = 0; stage < like.stages(); ++stage) {
    out.actions[like.rank_of_stage[stage]].push_back(
        {.stage = stage, .microbatch = 0, .kind = pipeline::Kind::forward});
  }
  for (auto stage = like.stages(); stage-- > 0;) {
    out.actions[like.rank_of_stage[stage]].push_back(
        {.stage = stage, .microbatch = 0, .kind = pipeline::Kind::backward});
  }
  return out;
}

std::optional<Checkpoint> begun_in(const Job& job) {
  const auto newest =
      job.resume && !job.checkpoints.empty() ? newest_checkpoint(job.checkpoints) : std::nullopt;
  return newest ? std::optional<Checkpoint>(std::in_place, *newest) : std::nullopt;
}

Stages stages_on(const Job& job, const pipeline::Schedule& schedule, uint32_t rank,
                 const std::optional<Checkpoint>& begun) {
  const auto ranges = stages_of(job, schedule);
  Stages out;
  for (const auto number : schedule.stages_of(rank)) {
    auto stage = std::make_shared<Stage>(job.model, ranges.at(number), job.device);
    if (begun) {
      load_weights(*stage, begun->weights());
    } else if (!job.weights.empty()) {
      load_weights(*stage, SavedWeights(job.weights));
    } else {
      stage->initialize(job.seed);
    }
    out.push_back(std::move(stage));
  }
  return out;
}

bool stays_gathered(const Job& job) { return job.pp > 1; }

std::unique_ptr<Parameters> parameters_of(const Job& job, const Stages& stages,
                                          const DataGroup& data) {
  if (job.zero == Zero::none) {
    return whole_parameters(stages, data);
  }
  return sharded_parameters(stages, data,
                            stays_gathered(job) ? Gathered::whole_step : Gathered::while_used);
}

AdamW optimizer_of(const Job& job, const Parameters& parameters) {
  std::vector<AdamW::Parameter> all;
  for (const auto& entry : parameters.entries()) {
    all.push_back({name_in_optimizer(entry), entry.value, entry.decay});
  }
  return {std::move(all), job.optimizer};
}

std::unique_ptr<offload::Session> session_of(const Job& job) {
  if (!job.offload && !job.fit) {
    return nullptr;
  }
  offload::Options options;
  options.budget = job.fit ? job.fit : job.offload_budget;
  options.recompute = job.fit.has_value();
  options.moves = !job.fit || !job.device.is_cpu();
  options.target = job.device.is_cpu() ? offload::Target::copy : offload::Target::host;
  return std::make_unique<offload::Session>(std::move(options));
}

Batches training_of(const Job& job, int64_t data_rank) {
  return {training_and_validation(job).first, batches_of(job, data_rank)};
}

Batches validation_of(const Job& job, int64_t data_rank) {
  const auto [training, rest] = training_and_validation(job);
  return {job.evaluate_every > 0 ? rest : training, batches_of(job, data_rank)};
}

}  // namespace tenure::train
