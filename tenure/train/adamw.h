// AdamW: torch's fused kernel on named parameters, with state that a checkpoint keeps.
//
// Weight decay is decoupled, and on matrices only, as nanoGPT and llm.c have it: biases and norms
// are not pulled towards zero. What is a matrix is said, not seen: a rank's piece of one is flat.
//
// One thread at a time.
#pragma once

#include <tenure/train/weights.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

namespace tenure::train {

enum class Decay { none, as_matrix };

// as_matrix for two dimensions and more.
Decay decay_of(const at::Tensor& weight);

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

class AdamW {
 public:
  struct Parameter {
    std::string name;
    at::Tensor value;
    Decay decay = Decay::as_matrix;
  };

  AdamW(std::vector<Parameter> parameters, const AdamWOptions& options);

  // Parameters without a gradient stay as they are, and so does their state.
  void step(double learning_rate);
  // Gradients are dropped, not filled with zeros.
  void zero_grad();

  // "exp_avg.NAME", "exp_avg_sq.NAME" and "step.NAME" of every parameter. These are the tensors
  // themselves, not copies.
  Weights state() const;
  // Copies. Throws InputError for a tensor that is missing, of no parameter, or of another shape;
  // then the state is as it was.
  void load_state(const Weights& state);

 private:
  // torch's own names, so that they mean something to whoever opens a checkpoint.
  struct State {
    at::Tensor exp_avg;
    at::Tensor exp_avg_sq;
    at::Tensor step;  // fp32 of no dimension, as the kernel wants it
  };
  struct Group;

  std::vector<Parameter> parameters_;
  std::vector<State> states_;  // one a parameter
  AdamWOptions options_;
};

}  // namespace tenure::train
