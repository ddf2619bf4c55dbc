// Parts of tensors of one dimension.
#pragma once

#include <tenure/core/alias.h>
#include <tenure/shard/layout.h>

#include <ATen/core/Tensor.h>

namespace tenure::shard {

// Some elements of a tensor of one dimension, as a view.
at::Tensor part(const at::Tensor& tensor, Range range);

}  // namespace tenure::shard
