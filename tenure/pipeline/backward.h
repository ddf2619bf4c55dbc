// Backward: what a forward leaves behind for its backward, and how that is run: whole, or first the
// gradients of the inputs and later those of the weights. Holds edges of autograd's graph and no
// tensor: a stage's output can go as soon as it is sent. One thread at a time.
//
// Note [Two halves of a backward]
// The nodes from which a gradient of an input can be reached lie on the inputs' path; all others
// lead to weights alone. Where the path leaves for a weight at a matrix product or a convolution,
// the first half keeps that node's incoming gradient and cuts all its edges but those to weights;
// the second half runs on from all such nodes at once. torch's nodes compute what edges ask for and
// nothing else, so nothing is computed twice. Other weights (norms, biases added by hand) are
// cheap: their gradients are found in the first half and wait for the second. So are those of nodes
// that are hooked, that are not torch's own, or that share a weight with another one on the path,
// for which running twice could mean counting twice.
//
// Note [A gradient leaves early]
// A rank that has one microbatch at a time, as the last of 1F1B, has nothing to do until the rank
// below has had its gradient and sent the next one: each message is waited for on both sides. There
// a whole backward is run in two halves, too, one right after the other, with the gradient sent in
// between: the rank below goes on while weights' products are found. Elsewhere the message is not
// what anybody waits for. A product whose two halves lie apart takes longer than one that is run
// whole, for what it reads has left the processor's caches; so but for the rank's last microbatch,
// after which it has nothing else to do, only the products wait that run last: they take longer
// than a message. To hooks, to functions of a user's own and to what saves tensors in its own way
// two halves are two backwards (FSDP2 would reduce twice, a checkpoint be computed twice), so this
// is done where there are none of them.
#pragma once

#include <tenure/core/alias.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace tenure::pipeline {

// Called while an exception of the engine's is handled; throws another one in its place, or
// returns. Installed once, by a language runtime whose hooks run in backwards and whose errors the
// engine wraps.
void install_translator(void (*translate)());

// When run_inputs runs a first half; else it runs the whole.
enum class Halves : uint8_t {
  always,         // wherever there are two
  if_plain,       // where nobody can tell the difference
  last_if_plain,  // the same, and only the weights wait whose products run last
};

class Backward {
 public:
  Backward();
  // `inputs` are leaves. Outputs that have no graph are passed over.
  Backward(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);
  Backward(Backward&&) noexcept;
  Backward& operator=(Backward&&) noexcept;
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
  ~Backward();

  // The leaves that gradients come to, inputs apart. REQUIRES: it has not run.
  std::vector<at::Tensor> leaves() const;
  // All gradients: weights' are added to them, those of the inputs are returned, in their order;
  // undefined where an input had none. `gradients` are those of the outputs, in their order; where
  // one is undefined nothing comes from there. Nothing is left behind.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& gradients);
  // The first half. What the second needs is leased to `owner` in `scope`.
  std::vector<at::Tensor> run_inputs(const std::vector<at::Tensor>& gradients, OwnerId owner,
                                     ScopeId scope, Halves halves = Halves::always);
  // The second half. REQUIRES: run_inputs.
  void run_weights();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tenure::pipeline
