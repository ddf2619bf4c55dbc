#include <tenure/train/split.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <algorithm>

namespace tenure::train {

std::vector<LayerRange> split_layers(int64_t layers, int64_t stages) {
  if (stages < 1) {
    throw InputError(text("a model is split into 1 stage or more, not ", stages, "."));
  }
  if (stages > layers) {
    throw InputError(text("more stages than layers: ", stages, " stages, and the model has ",
                          count_text(static_cast<uint64_t>(std::max<int64_t>(layers, 0)), "layer"),
                          "."));
  }
  std::vector<LayerRange> ranges;
  int64_t first = 0;
  for (int64_t stage = 0; stage < stages; ++stage) {
    const auto size = layers / stages + (stage < layers % stages ? 1 : 0);
    ranges.push_back({first, first + size});
    first += size;
  }
  return ranges;
}

}  // namespace tenure::train
