// Weights: tensors under the names that Hugging Face gives them in its files.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace tenure::train {

using Weights = std::vector<std::pair<std::string, at::Tensor>>;

}  // namespace tenure::train
