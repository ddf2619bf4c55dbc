// What happens to gradients between backward and the optimizer, where a model is in several parts:
// copies of a tied matrix get the sum of both gradients, and the norm is that of the whole model.
//
// All ranks of the pipelines make the same calls; one thread.
#pragma once

#include <tenure/pipeline/channel.h>
#include <tenure/train/parameters.h>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>

namespace tenure::train {

// Where the two copies of a tied matrix are: the pipeline's ranks of the first and the last stage.
struct TiedRanks {
  int64_t first = 0;
  int64_t last = 0;
};

// Nothing where there is one copy, or none here.
void add_tied(const Parameters& parameters, const pipeline::Groups& pipe, TiedRanks ranks,
              std::chrono::milliseconds timeout);

// The norm of all gradients of the model, on the device; they are scaled down to `most` if that is
// more. 0: they stay as they are. As torch.nn.utils.clip_grad_norm_ does it on one rank.
at::Tensor clip(const Parameters& parameters, const pipeline::Groups& pipe, const DataGroup& data,
                double most);

}  // namespace tenure::train
