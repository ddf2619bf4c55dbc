// Sampling: tokens that a whole model continues a prompt with, one after the other.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tenure::train {

struct SampleOptions {
  int64_t count = 64;      // tokens to add
  double temperature = 1;  // 0: always the likeliest
  int64_t top_k = 0;       // only among so many likeliest; 0: among all
  int64_t context = 0;     // the model sees at most so many tokens, the last ones
};

// Tokens [1, T] of int64 -> logits [1, T, V].
using WholeModel = std::function<at::Tensor(const at::Tensor&)>;

// The added tokens. Drawn on the host with the generator, which must be of the host, so equal
// logits give equal tokens on every device. Throws InputError for an empty prompt and for options
// without meaning.
std::vector<int64_t> sample(const WholeModel& model, const std::vector<int64_t>& prompt,
                            const SampleOptions& options, const at::Generator& generator,
                            at::Device device = at::kCPU);

}  // namespace tenure::train
