#include <tenure/train/job.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/pipeline/csv.h>
#include <tenure/train/batches.h>
#include <tenure/train/checkpoint.h>
#include <tenure/train/input_file.h>
#include <tenure/train/saved_weights.h>
#include <tenure/train/stage.h>
#include <tenure/train/tokens.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

namespace tenure::train {
namespace {

constexpr int64_t kMost = std::numeric_limits<uint16_t>::max();
// What a weight takes with its gradient and AdamW's two averages, in fp32.
constexpr uint64_t kBytesOfWeight = 16;

void require_at_least(int64_t value, int64_t least, const char* what) {
  if (value < least) {
    throw InputError(text(what, " must be ", least, " or more, not ", value, "."));
  }
}

void require_fraction(double value, const char* what) {
  const bool fits = value >= 0 && value < 1;
  if (!fits) {
    throw InputError(text(what, " must be from 0 to below 1, not ", value, "."));
  }
}

void require_not_negative(double value, const char* what) {
  const bool fits = std::isfinite(value) && value >= 0;
  if (!fits) {
    throw InputError(text(what, " must be 0 or more, not ", value, "."));
  }
}

void check_figures(const Job& job) {
  require_at_least(job.steps(), 1, "the number of steps");
  require_at_least(job.rows, 1, "the rows of a batch");
  require_at_least(job.length, 1, "the length of a sequence");
  require_at_least(job.microbatches, 1, "the number of microbatches");
  require_at_least(job.evaluate_every, 0, "the steps between evaluations");
  require_at_least(job.evaluate_batches, 1, "the batches of an evaluation");
  require_at_least(job.sample_every, 0, "the steps between samples");
  require_at_least(job.sample_tokens, 0, "the tokens of a sample");
  require_at_least(job.save_every, 0, "the steps between checkpoints");
  require_at_least(job.keep, 0, "the number of checkpoints to keep");
  require_at_least(job.learning_rate.warm_up, 0, "the steps of the warm-up");
  require_not_negative(job.learning_rate.peak, "the learning rate");
  require_not_negative(job.learning_rate.least, "the least learning rate");
  require_not_negative(job.optimizer.weight_decay, "the weight decay");
  require_not_negative(job.optimizer.eps, "AdamW's eps");
  require_not_negative(job.clip, "the norm that gradients are clipped to");
  require_fraction(job.optimizer.beta1, "AdamW's beta1");
  require_fraction(job.optimizer.beta2, "AdamW's beta2");
  if (job.timeout.count() <= 0) {
    throw InputError("the timeout must be more than 0 seconds.");
  }
  if (job.rows % job.microbatches != 0) {
    throw InputError(text("a batch of ", count_text(static_cast<uint64_t>(job.rows), "row"),
                          " cannot be split into ", job.microbatches,
                          " microbatches of equal size: choose a number that divides it."));
  }
  if (job.length > job.model.context) {
    throw InputError(text("sequences of ", job.length,
                          " tokens are longer than the model's context, ", job.model.context, "."));
  }
  if (job.sample_every > 0 && job.prompt.empty()) {
    throw InputError("a sample continues a prompt: give it one character at least.");
  }
  for (const auto byte : job.prompt) {
    const auto token = static_cast<int64_t>(static_cast<unsigned char>(byte));
    if (job.sample_every > 0 && token >= job.model.vocab) {
      throw InputError(
          text("a sample cannot continue this prompt: its bytes are tokens, one of them ", token,
               ", and the model has ", job.model.vocab,
               " tokens: give another prompt, or take no samples."));
    }
  }
}

void check_ranks(const Job& job, int64_t ranks) {
  for (const auto& [value, name] : {std::pair(job.pp, "pp"), std::pair(job.dp, "dp")}) {
    if (value < 1 || value > kMost) {
      throw InputError(text(name, " is a number of ranks from 1 to ", kMost, ", not ", value, "."));
    }
  }
  if (job.vpp < 0 || job.vpp > kMost) {
    throw InputError(text("vpp is a number of stages a rank, not ", job.vpp, "."));
  }
  if (job.ranks() != ranks) {
    throw InputError(text("the job is for ", count_text(static_cast<uint64_t>(job.ranks()), "rank"),
                          " (pp ", job.pp, " times dp ", job.dp, "), and there ",
                          ranks == 1 ? "is 1." : text("are ", ranks, ".")));
  }
}

uint64_t weights_of(const ModelConfig& model, LayerRange range) {
  uint64_t out = 0;
  for (const auto& [name, value] : Stage(model, range, at::kMeta).named_weights()) {
    out += static_cast<uint64_t>(value.numel());
  }
  return out;
}

// What no activation can be moved out of the way of.
void check_budget(const Job& job, const std::vector<LayerRange>& stages,
                  const pipeline::Schedule& schedule) {
  const auto budget = job.fit ? job.fit : job.offload_budget;
  if (!budget) {
    return;
  }
  uint64_t most = 0;
  for (uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    uint64_t own = 0;
    for (const auto stage : schedule.stages_of(rank)) {
      own += weights_of(job.model, stages.at(stage)) * kBytesOfWeight;
    }
    most = std::max(most, own);
  }
  if (job.zero == Zero::parameters) {
    most /= static_cast<uint64_t>(job.dp);
  }
  if (*budget <= most) {
    throw InputError(text(job.fit ? "a budget of " : "an offload budget of ", bytes_text(*budget),
                          " cannot be met: the weights, gradients and optimizer of a rank take ",
                          bytes_text(most), " before any activation."));
  }
}

void check_fit(const Job& job) {
  if (job.fit && job.offload) {
    throw InputError("a fit moves what is best moved to the host: leave offload out.");
  }
  if (job.fit && job.activations == Activations::recomputed) {
    throw InputError("a fit makes again what is best made again: leave recompute out.");
  }
}

void check_data(const Job& job) {
  const auto [training, rest] = training_and_validation(job);
  const BatchOptions options{.rows = job.rows, .length = job.length, .vocab = job.model.vocab};
  const Batches of_training(training, options);
  if (job.evaluate_every > 0) {
    const Batches of_validation(rest, options);
  }
}

void check_checkpoint(const Job& job) {
  if (job.checkpoints.empty()) {
    if (job.resume) {
      throw InputError("there is nothing to resume from without a folder of checkpoints.");
    }
    return;
  }
  const auto newest = job.resume ? newest_checkpoint(job.checkpoints) : std::nullopt;
  if (newest) {
    const Checkpoint saved(*newest);
    saved.verify();
    if (saved.model() != job.model) {
      throw InputError(text(*newest, " is of another model: resume with its --model and --size."));
    }
  }
}

}  // namespace

std::pair<Tokens, Tokens> training_and_validation(const Job& job) {
  constexpr double held_out = 0.1;
  constexpr auto all = std::numeric_limits<uint64_t>::max();
  auto tokens = Tokens::open(job.data, all);
  if (!job.validation.empty()) {
    return {tokens, Tokens::open(job.validation, all)};
  }
  return job.evaluate_every > 0 ? tokens.split(held_out) : std::pair(tokens, tokens);
}

pipeline::Schedule pipeline_of(const Job& job) {
  const auto ranks = static_cast<uint32_t>(job.pp);
  const auto microbatches = static_cast<uint32_t>(job.microbatches);
  if (!job.pipeline.ends_with(".csv")) {
    return pipeline::make_schedule(job.pipeline, ranks, microbatches,
                                   static_cast<uint32_t>(job.vpp));
  }
  auto out = [&] {
    try {
      return pipeline::from_csv(read_whole(job.pipeline), job.pipeline);
    } catch (const InputError& error) {
      const std::string_view said = error.what();
      const bool names_it = said.find(job.pipeline) != std::string_view::npos;
      throw InputError(names_it ? std::string(said) : text(job.pipeline, ": ", said));
    }
  }();
  if (out.ranks() != ranks || out.microbatches != microbatches) {
    throw InputError(text(job.pipeline, " is for ", count_text(out.ranks(), "rank"), " and ",
                          count_text(out.microbatches, "microbatch"), ", and the job has ", ranks,
                          " and ", microbatches, "."));
  }
  const auto trains = [](const auto& actions) {
    return std::ranges::any_of(actions, [](const pipeline::Action& action) {
      return action.kind != pipeline::Kind::forward;
    });
  };
  if (std::ranges::none_of(out.actions, trains)) {
    throw InputError(text(job.pipeline, " has no backward, so that nothing would be trained."));
  }
  return out;
}

std::vector<LayerRange> stages_of(const Job& job, const pipeline::Schedule& schedule) {
  return split_layers(job.model.layers, schedule.stages());
}

void check(const Job& job, int64_t ranks) {
  check(job.model);
  check_figures(job);
  check_ranks(job, ranks);
  check_fit(job);
  const auto schedule = pipeline_of(job);
  const auto stages = stages_of(job, schedule);
  check_budget(job, stages, schedule);
  check_data(job);
  if (!job.weights.empty()) {
    const SavedWeights saved(job.weights);
  }
  check_checkpoint(job);
}

}  // namespace tenure::train
