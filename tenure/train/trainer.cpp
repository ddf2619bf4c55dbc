#include <tenure/train/trainer.h>

#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/meter.h>
#include <tenure/core/sample.h>
#include <tenure/core/text.h>
#include <tenure/offload/active.h>
#include <tenure/pipeline/pipeline.h>
#include <tenure/shard/collectives.h>
#include <tenure/train/batches.h>
#include <tenure/train/checkpoint.h>
#include <tenure/train/chunk.h>
#include <tenure/train/from_job.h>
#include <tenure/train/gradients.h>
#include <tenure/train/sample.h>
#include <tenure/train/spare_heap.h>
#include <tenure/train/world.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <chrono>
#include <utility>

namespace tenure::train {
namespace {

constexpr double kNotKnown = -1;

// What AdamW::state() has of each parameter, in this order.
constexpr std::array kStates{"exp_avg.", "exp_avg_sq.", "step."};

std::optional<int64_t> known(double figure) {
  return figure == kNotKnown ? std::nullopt : std::optional(static_cast<int64_t>(figure));
}

double figure_of(std::optional<int64_t> value) {
  return value ? static_cast<double>(*value) : kNotKnown;
}

std::vector<int64_t> tokens_of(const std::string& prompt) {
  std::vector<int64_t> out;
  for (const char next : prompt) {
    out.push_back(static_cast<unsigned char>(next));
  }
  return out;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

struct Trainer::State {
  State(const Job& given, TrainGroups with);

  StepReport step(int64_t number);
  double evaluate();
  std::vector<int64_t> sample_text(int64_t number);
  std::string save(int64_t number);
  void lease();
  void load_optimizer(const Checkpoint& from);
  void take(const Batch& batch);
  std::unique_ptr<pipeline::Pipeline> pipeline_with(pipeline::Schedule of, bool strict);
  pipeline::StepResult pass(pipeline::Pass kind);
  template <class Work>
  auto in_step(const Work& work);
  bool has_last() const { return schedule.rank_of_stage.back() == pipe_rank; }
  std::vector<double> figures(double loss) const;
  void give_back_heap();

  Job job;
  TrainGroups groups;
  World world;
  std::optional<HostCount> counting;  // before any tensor that is to be counted
  std::unique_ptr<Meter> meter;
  uint32_t pipe_rank;
  int64_t data_rank;
  pipeline::Schedule schedule;
  std::vector<std::string> stages_of_ranks;  // of the pipeline, in words
  std::optional<Checkpoint> begun;
  int64_t begin = 0;
  Stages stages;
  std::unique_ptr<Parameters> parameters;
  AdamW optimizer;
  std::vector<Lease> leases;
  std::unique_ptr<offload::Session> session;
  Microbatches microbatches;
  std::unique_ptr<pipeline::Pipeline> pipe;
  std::unique_ptr<pipeline::Pipeline> asked;  // for samples: one microbatch
  Batches training;
  Batches validation;
  pipeline::Loss loss_of;
  bool enough = false;  // this rank's listener says so
  Meter::Reading memory;
  SpareHeap spare;
  std::optional<int64_t> fitted;  // the most of the last step, if it followed its plan
};

Trainer::State::State(const Job& given, TrainGroups with)
    : job((check(given, with.world->getSize()), given)),
      groups(std::move(with)),
      world(groups.world, job.timeout),
      pipe_rank(static_cast<uint32_t>(world.rank() / job.dp)),
      data_rank(world.rank() % job.dp),
      schedule(pipeline_of(job)),
      begun(begun_in(job)),
      optimizer({}, {}),
      training(training_of(job, data_rank)),
      validation(validation_of(job, data_rank)) {
  groups.data.timeout = job.timeout;
  if (job.device.is_cpu() && (job.strict || job.fit)) {
    counting.emplace();
  }
  for (uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    stages_of_ranks.push_back(described(stages_of(job, schedule), schedule, rank));
  }
  stages = stages_on(job, schedule, pipe_rank, begun);
  meter = std::make_unique<Meter>(
      job.device);  // there may have been no device's allocator to ask before
  parameters = parameters_of(job, stages, groups.data);
  optimizer = optimizer_of(job, *parameters);
  session = session_of(job);
  if (begun) {
    begin = begun->step();
    load_optimizer(*begun);
  }
  lease();
  training.seek(begin);
  pipe = pipeline_with(schedule, job.strict && (job.zero == Zero::none || stays_gathered(job)));
  if (job.sample_every > 0) {
    asked = pipeline_with(one_after_the_other(schedule), false);
  }
  loss_of = [this](uint32_t microbatch, const std::vector<at::Tensor>& outputs) {
    return loss(outputs.front(), microbatches.targets.at(microbatch));
  };
}

std::unique_ptr<pipeline::Pipeline> Trainer::State::pipeline_with(pipeline::Schedule of,
                                                                  bool strict) {
  std::vector<std::unique_ptr<pipeline::Stage>> chunks;
  for (size_t i = 0; i < stages.size(); ++i) {
    chunks.push_back(std::make_unique<Chunk>(*stages[i], i, *parameters, microbatches, job));
  }
  return std::make_unique<pipeline::Pipeline>(
      std::move(of), std::move(chunks), groups.pipe,
      pipeline::Options{.timeout = job.timeout,
                        .strict = strict ? pipeline::Strict::on : pipeline::Strict::off});
}

// So that whoever asks is told whose bytes these are. Pieces are leased by who made them.
void Trainer::State::lease() {
  if (!parameters->in_pieces()) {
    for (const auto& entry : parameters->entries()) {
      leases.push_back(hold(entry.value, intern_owner(OwnerKind::parameter, entry.name)));
    }
  }
  for (const auto& [name, value] : optimizer.state()) {
    leases.push_back(hold(value, intern_owner(OwnerKind::optimizer, name)));
  }
}

void Trainer::State::load_optimizer(const Checkpoint& from) {
  const auto& entries = parameters->entries();
  auto state = optimizer.state();
  for (size_t i = 0; i < state.size(); ++i) {
    const auto entry = i / kStates.size();
    const auto whole = from.optimizer_state(kStates.at(i % kStates.size()) + entries[entry].name);
    state[i].second = whole.dim() == 0 ? whole : parameters->own_part(entry, whole.to(job.device));
  }
  optimizer.load_state(state);
}

void Trainer::State::take(const Batch& batch) {
  const auto split = [&](const at::Tensor& all) {
    return all.to(job.device).chunk(job.microbatches);
  };
  microbatches.tokens = split(batch.tokens);
  microbatches.targets = split(batch.targets);
}

// Weights are in place while it runs; whatever it throws, they are not afterwards.
template <class Work>
auto Trainer::State::in_step(const Work& work) {
  parameters->begin();
  try {
    auto out = work();
    parameters->end();
    return out;
  } catch (...) {
    parameters->give_up();
    throw;
  }
}

pipeline::StepResult Trainer::State::pass(pipeline::Pass kind) {
  if (kind == pipeline::Pass::forward || !session) {
    return pipe->step(kind, loss_of);
  }
  std::vector<StorageRef> stay;
  for (const auto& weight : parameters->weights()) {
    stay.emplace_back(weight);
  }
  session->never(std::move(stay));
  offload::Active active(*session);
  auto out = pipe->step(kind, loss_of);
  active.end();
  const auto stats = session->stats();
  fitted =
      job.fit && stats.mode == offload::Mode::planned ? std::optional(stats.peak) : std::nullopt;
  return out;
}

std::vector<double> Trainer::State::figures(double loss) const {
  auto promise = pipe->promise();
  auto stats = pipe->stats();
  if (stats.steps == 1) {  // a lesson: libraries take their workspaces in it
    promise.bytes.reset();
    stats.peak_bytes.reset();
  }
  return {has_last() ? 1.0 : 0.0,
          loss,
          enough ? 1.0 : 0.0,
          static_cast<double>(stats.most_in_flight.all()),
          static_cast<double>(promise.in_flight.all()),
          figure_of(stats.peak_bytes),
          figure_of(promise.bytes ? std::optional(*promise.bytes + stats.message_bytes.value_or(0))
                                  : std::nullopt),
          static_cast<double>(memory.current),
          static_cast<double>(memory.peak),
          static_cast<double>(Sampler::shared().sample().process.rss),
          figure_of(fitted)};
}

StepReport Trainer::State::step(int64_t number) {
  const auto began = std::chrono::steady_clock::now();
  take(training.next());
  const auto result = in_step([&] { return pass(pipeline::Pass::train); });
  const auto last = schedule.stages() - 1;
  add_tied(*parameters, groups.pipe,
           {.first = schedule.rank_of_stage.front(), .last = schedule.rank_of_stage[last]},
           job.timeout);
  const auto norm = clip(*parameters, groups.pipe, groups.data, job.clip);
  StepReport report;
  report.step = number;
  report.learning_rate = learning_rate(job.learning_rate, number - 1);
  optimizer.step(report.learning_rate);
  optimizer.zero_grad();
  report.norm = norm.item<double>();
  memory = meter->read();
  const auto own = has_last() ? result.loss.item<double>() : 0.0;
  double losses = 0;
  bool stop = false;
  const auto all = world.share(figures(own), "reporting a step");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto& of = all[rank];
    losses += of[0] * of[1];
    stop = stop || of[2] != 0;
    report.ranks.push_back({
        .stages = stages_of_ranks.at(rank / static_cast<size_t>(job.dp)),
        .in_flight = static_cast<uint32_t>(of[3]),
        .in_flight_bound = static_cast<uint32_t>(of[4]),
        .activations = known(of[5]),
        .activations_bound = known(of[6]),
        .allocated = static_cast<int64_t>(of[7]),
        .peak = static_cast<int64_t>(of[8]),
        .rss = static_cast<int64_t>(of[9]),
        .fitted = known(of[10]),
    });
  }
  enough = stop;
  report.loss = losses / static_cast<double>(job.dp);
  report.tokens = job.rows * job.length * job.dp;
  report.seconds = seconds_since(began);
  return report;
}

double Trainer::State::evaluate() {
  const at::NoGradGuard no_grad;
  validation.seek(0);
  double sum = 0;
  in_step([&] {
    for (int64_t i = 0; i < job.evaluate_batches; ++i) {
      take(validation.next());
      const auto result = pass(pipeline::Pass::forward);
      sum += has_last() ? result.loss.item<double>() : 0.0;
    }
    return true;
  });
  double all = 0;
  for (const auto& of : world.share({sum}, "reporting an evaluation")) {
    all += of.front();
  }
  return all / static_cast<double>(job.evaluate_batches * job.dp);
}

std::vector<int64_t> Trainer::State::sample_text(int64_t number) {
  const auto generator =
      at::make_generator<at::CPUGeneratorImpl>(job.seed + static_cast<uint64_t>(number));
  const auto root = static_cast<int64_t>(schedule.rank_of_stage.back());
  // Every rank draws, from the same logits with the same generator: all know the next token.
  const auto ask = [&](const at::Tensor& tokens) {
    microbatches.tokens = {tokens};
    const auto result = asked->step(pipeline::Pass::forward, {});
    auto logits = has_last() ? result.outputs.front().front().select(1, -1).to(at::kFloat)
                             : at::empty({1, job.model.vocab});
    logits = logits.to(at::kCPU).contiguous();
    if (schedule.ranks() > 1) {
      std::vector<at::Tensor> row{logits};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      shard::Pending([&] {
        return groups.pipe.side->broadcast(row, options);
      }).wait(job.timeout, [] { return std::string("sharing the logits of a sample"); });
    }
    return logits.unsqueeze(1);
  };
  const auto prompt = tokens_of(job.prompt);
  return in_step([&] {
    return sample(ask, prompt, {.count = job.sample_tokens, .context = job.model.context},
                  generator, job.device);
  });
}

std::string Trainer::State::save(int64_t number) {
  const at::NoGradGuard no_grad;
  const auto& entries = parameters->entries();
  const bool writes = data_rank == 0;
  NewCheckpoint::Part part;
  part.parts = job.pp;
  part.number = writes ? pipe_rank + 1 : 0;
  const auto join_into = [&](Weights& out, const std::vector<at::Tensor>& own,
                             const std::string& prefix) {
    parameters->join(own, [&](size_t i, const at::Tensor& whole) {
      if (writes && !entries[i].is_copy) {
        out.emplace_back(prefix + entries[i].name, whole.detach().to(at::kCPU, true, true));
      }
    });
  };
  join_into(part.weights, parameters->values(), "");
  const auto state = optimizer.state();
  for (size_t kind = 0; kind < kStates.size(); ++kind) {
    std::vector<at::Tensor> own;
    for (size_t i = kind; i < state.size(); i += kStates.size()) {
      own.push_back(state[i].second);
    }
    if (own.front().dim() != 0) {
      join_into(part.optimizer, own, kStates.at(kind));
      continue;
    }
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!entries[i].is_copy) {
        part.optimizer.emplace_back(kStates.at(kind) + entries[i].name, own[i]);
      }
    }
  }
  const NewCheckpoint checkpoint(
      job.checkpoints, number,
      [this](bool well, const std::string& doing) { world.require_all(well, doing); });
  auto path = checkpoint.write(part, job.model, world.rank() == 0);
  if (world.rank() == 0) {
    remove_older(job.checkpoints, job.keep);
  }
  return path;
}

// See Note [Holes in the heap]. Where tensors are on a device the heap has none of them.
void Trainer::State::give_back_heap() {
  if (!job.device.is_cpu()) {
    return;
  }
  const auto process = Sampler::shared().sample().process;
  spare.step_ended(process.rss - process.files.value_or(0));
}

Trainer::Trainer(const Job& job, TrainGroups groups)
    : state_(std::make_unique<State>(job, std::move(groups))) {}
Trainer::~Trainer() = default;

void Trainer::run(Listener& listener) {
  auto& state = *state_;
  const auto& job = state.job;
  const auto due = [](int64_t every, int64_t number) { return every > 0 && number % every == 0; };
  const auto prompt = tokens_of(job.prompt);
  for (auto number = state.begin + 1; number <= job.steps(); ++number) {
    const auto report = state.step(number);
    const bool stops = state.enough;  // what all ranks agreed on
    const bool last = stops || number == job.steps();
    state.enough = !listener.stepped(report) || stops;
    if (due(job.evaluate_every, number) || (last && job.evaluate_every > 0)) {
      listener.evaluated(number, state.evaluate());
    }
    if (due(job.sample_every, number) || (last && job.sample_every > 0)) {
      listener.sampled(number, prompt, state.sample_text(number));
    }
    if (!job.checkpoints.empty() && (due(job.save_every, number) || last)) {
      listener.saved(number, state.save(number));
    }
    if (last) {
      break;
    }
    state.give_back_heap();
  }
}

int64_t Trainer::steps() const { return state_->job.steps(); }

int64_t Trainer::begin_step() const { return state_->begin; }

int64_t Trainer::parameters() const {
  int64_t out = 0;
  const auto& model = state_->job.model;
  for (const auto& [name, value] : Stage(model, {0, model.layers}, at::kMeta).named_weights()) {
    out += value.numel();
  }
  return out;
}

Weights Trainer::weights() const {
  const at::NoGradGuard no_grad;
  const auto& entries = state_->parameters->entries();
  Weights out;
  state_->parameters->join(state_->parameters->values(), [&](size_t i, const at::Tensor& whole) {
    out.emplace_back(entries[i].name, whole.detach().to(at::kCPU, true, true));
  });
  return out;
}

}  // namespace tenure::train
