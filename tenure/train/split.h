// Which stage of a pipeline has which layers. Pure functions of plain data.
#pragma once

#include <cstdint>
#include <vector>

namespace tenure::train {

// The layers [first, last) of a model.
struct LayerRange {
  int64_t first = 0;
  int64_t last = 0;

  int64_t size() const { return last - first; }
  bool operator==(const LayerRange&) const = default;
};

// One range a stage, in order, whose sizes differ by one at most, the larger ones first. Throws
// InputError for more stages than layers.
std::vector<LayerRange> split_layers(int64_t layers, int64_t stages);

}  // namespace tenure::train
