#include <tenure/train/sample.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <limits>

namespace tenure::train {
namespace {

void check(const std::vector<int64_t>& prompt, const SampleOptions& options) {
  if (prompt.empty()) {
    throw InputError("a model continues a prompt: give it one token at least.");
  }
  if (options.count < 0 || options.top_k < 0 || options.context < 1 ||
      !(options.temperature >= 0)) {
    throw InputError(text("sampling ", options.count, " tokens at temperature ",
                          options.temperature, " among the ", options.top_k,
                          " likeliest with a context of ", options.context, " has no meaning."));
  }
}

// From logits [V].
int64_t draw(at::Tensor logits, const SampleOptions& options, const at::Generator& generator) {
  if (options.temperature == 0) {
    return logits.argmax().item<int64_t>();
  }
  logits = logits / options.temperature;
  if (options.top_k > 0 && options.top_k < logits.size(0)) {
    const auto [values, places] = logits.topk(options.top_k);
    const auto drawn = at::multinomial(values.softmax(0), 1, false, generator);
    return places[drawn.item<int64_t>()].item<int64_t>();
  }
  return at::multinomial(logits.softmax(0), 1, false, generator).item<int64_t>();
}

}  // namespace

std::vector<int64_t> sample(const WholeModel& model, const std::vector<int64_t>& prompt,
                            const SampleOptions& options, const at::Generator& generator,
                            at::Device device) {
  check(prompt, options);
  const at::NoGradGuard no_grad;
  auto row = prompt;
  for (int64_t i = 0; i < options.count; ++i) {
    const auto seen = std::min<size_t>(row.size(), static_cast<size_t>(options.context));
    const auto tokens =
        at::tensor(at::ArrayRef<int64_t>(row).slice(row.size() - seen), at::kLong).to(device);
    const auto logits = model(tokens.unsqueeze(0)).select(0, 0).select(0, -1);
    row.push_back(draw(logits.to(at::kFloat).to(at::kCPU), options, generator));
  }
  return {row.begin() + static_cast<std::ptrdiff_t>(prompt.size()), row.end()};
}

}  // namespace tenure::train
