#include <tenure/train/chunk.h>

#include <tenure/core/text.h>
#include <tenure/core/where.h>
#include <tenure/train/recompute.h>

#include <ATen/autocast_mode.h>

#include <utility>

namespace tenure::train {
namespace {

// While it lives, operators that are as good in bf16 run in it. Its copies of weights go with it.
class Autocast {
 public:
  Autocast(c10::DeviceType device, Precision precision)
      : device_(device),
        before_(at::autocast::is_autocast_enabled(device)),
        type_before_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device, precision == Precision::bf16);
    at::autocast::set_autocast_dtype(device, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(device_, before_);
    at::autocast::set_autocast_dtype(device_, type_before_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_;
  bool before_;
  at::ScalarType type_before_;
};

// Embedding and head are layers of their own, beside those that the model counts.
std::vector<NameId> places_of(const train::Stage& stage) {
  std::vector<NameId> out;
  if (stage.is_first()) {
    out.push_back(intern("embedding"));
  }
  for (auto number = stage.range().first; number < stage.range().last; ++number) {
    out.push_back(intern(text("layer ", number)));
  }
  out.resize(stage.layers().size(), intern("head"));
  return out;
}

}  // namespace

Chunk::Chunk(const train::Stage& stage, size_t number, Parameters& parameters,
             const Microbatches& microbatches, const Job& job)
    : stage_(stage),
      number_(number),
      parameters_(parameters),
      microbatches_(microbatches),
      job_(job),
      places_(places_of(stage)) {}

at::Tensor Chunk::run(size_t layer, const at::Tensor& x) const {
  const Autocast autocast(job_.device.type(), job_.precision);
  auto here = where();
  here.module = places_[layer];
  const At at(here);
  return parameters_.run(number_, layer, x);
}

std::vector<at::Tensor> Chunk::forward(uint32_t microbatch, std::vector<at::Tensor> inputs) {
  auto x = stage_.is_first() ? microbatches_.tokens.at(microbatch) : inputs.front();
  inputs.clear();
  for (size_t layer = 0; layer < stage_.layers().size(); ++layer) {
    if (job_.activations == Activations::stored) {
      x = run(layer, x);
      continue;
    }
    x = recomputed([this, layer](const at::Tensor& input) { return run(layer, input); }, x,
                   parameters_.weights_of(number_, layer));
  }
  return {std::move(x)};
}

std::vector<at::Tensor> Chunk::parameters() const {
  std::vector<at::Tensor> out;
  for (size_t layer = 0; layer < stage_.layers().size(); ++layer) {
    const auto& own = parameters_.weights_of(number_, layer);
    out.insert(out.end(), own.begin(), own.end());
  }
  if (number_ == 0) {  // pieces get gradients, too; they are not by stage
    for (const auto& entry : parameters_.entries()) {
      out.push_back(entry.value);
    }
  }
  return out;
}

}  // namespace tenure::train
