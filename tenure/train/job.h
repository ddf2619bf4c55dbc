// Job: what is trained, on what, for how long, and on how many ranks in which way. Plain data.
#pragma once

#include <tenure/pipeline/schedule.h>
#include <tenure/train/adamw.h>
#include <tenure/train/config.h>
#include <tenure/train/schedule.h>
#include <tenure/train/split.h>
#include <tenure/train/tokens.h>

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tenure::train {

// Which of a model's state the data-parallel ranks share out among themselves.
enum class Zero : uint8_t {
  none,        // each has all of it
  parameters,  // and gradients and the optimizer's: stage 3
};

enum class Activations : uint8_t { stored, recomputed };
enum class Precision : uint8_t { fp32, bf16 };  // bf16: by autocast, weights stay fp32

struct Job {
  ModelConfig model;
  std::string weights;     // Hugging Face's, a file or a folder, to begin with; none: random
  std::string data;        // see Tokens::open
  std::string validation;  // the same; none: the last tenth of the data

  int64_t rows = 16;         // sequences a step, of one data-parallel rank
  int64_t length = 128;      // tokens a sequence
  int64_t microbatches = 4;  // in which a step's rows are done
  Schedule learning_rate;    // its steps are the run's
  AdamWOptions optimizer;
  double clip = 1;  // the most that the norm of all gradients may be; 0: anything
  uint64_t seed = 0;

  int64_t pp = 1;                 // ranks of a pipeline
  int64_t vpp = 0;                // stages a rank; 0: what the schedule has
  int64_t dp = 1;                 // pipelines
  std::string pipeline = "1f1b";  // a schedule's name, or a file .csv
  Zero zero = Zero::none;
  bool offload = false;
  std::optional<uint64_t> offload_budget;  // none: all that can go, goes
  // The most that a rank's device may hold in a step: what is saved is kept, moved or made again,
  // whatever is cheapest. Excludes `offload` and recomputed layers.
  std::optional<uint64_t> fit;
  Activations activations = Activations::stored;
  c10::Device device = c10::kCPU;
  Precision precision = Precision::fp32;
  bool strict = true;  // hold every step against the schedule's bound
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of any wait for another rank

  int64_t evaluate_every = 0;  // steps; this and the next two: 0 is never
  int64_t evaluate_batches = 4;
  int64_t sample_every = 0;
  int64_t sample_tokens = 128;
  std::string prompt = "def ";  // its bytes are tokens

  std::string checkpoints;  // a folder; none: nothing is saved
  int64_t save_every = 0;   // steps; 0: at the end
  int64_t keep = 2;         // checkpoints; 0: all
  bool resume = false;      // from the newest that is there, if there is one

  int64_t steps() const { return learning_rate.steps; }
  int64_t ranks() const { return pp * dp; }
};

// The job's pipeline. Throws InputError for a schedule that there is not, and for a file's that
// cannot run or is for other ranks or microbatches.
pipeline::Schedule pipeline_of(const Job& job);

// The layers of the pipeline's stages, in order. Throws InputError for more stages than layers.
std::vector<LayerRange> stages_of(const Job& job, const pipeline::Schedule& schedule);

// What is trained on, and what is evaluated on.
std::pair<Tokens, Tokens> training_and_validation(const Job& job);

// Throws InputError, in a sentence, for whatever cannot run. Opens all that the job reads.
void check(const Job& job, int64_t ranks);

}  // namespace tenure::train
