// Rope: the tables of cosines and sines that turn queries and keys by their positions. One for all
// blocks of a stage: one table, as long as the longest rows so far, and not one a layer. What
// samples and evaluations ask for in between does not have it made again in the midst of a training
// step.
//
// One thread at a time.
#pragma once

#include <tenure/train/config.h>

#include <ATen/core/Tensor.h>

namespace tenure::train {

// Radians a position, for each of the head_width / 2 pairs, fp32 on the host; with the stretch of
// Llama 3.1 where the configuration has it. Computed in fp32, because that is what models were
// trained with: at position 8,192 an exact frequency would be off by 5e-4 radians.
at::Tensor rope_frequencies(const ModelConfig& config);

class Rope {
 public:
  explicit Rope(const ModelConfig& config) : frequencies_(rope_frequencies(config)) {}

  // [B, heads, T, head_width], turned: element i is paired with i + head_width / 2.
  at::Tensor turn(const at::Tensor& x);

 private:
  void tabulate(const at::Tensor& like);

  at::Tensor frequencies_;
  at::Tensor cos_;  // both [longest T, head_width]
  at::Tensor sin_;
};

}  // namespace tenure::train
