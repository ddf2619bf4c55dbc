// Alias: a tensor of one dimension that is kept past a call. What keeps its storage alive is a
// lease, and the tensor itself is made anew whenever it is wanted.
#pragma once

#include <tenure/core/hold.h>
#include <tenure/core/scope.h>
#include <tenure/shard/layout.h>

#include <ATen/core/Tensor.h>

namespace tenure::shard {

// Some elements of a tensor of one dimension, as a view.
at::Tensor part(const at::Tensor& tensor, Range range);

class Alias {
 public:
  Alias() = default;
  // REQUIRES: contiguous, of one dimension.
  Alias(const at::Tensor& tensor, OwnerId owner)
      : lease_(hold(tensor, owner, ScopeId::process)),
        type_(tensor.scalar_type()),
        offset_(tensor.storage_offset()),
        size_(tensor.numel()) {}

  // With a version counter of its own. Also of a released storage.
  at::Tensor tensor() const;
  bool defined() const { return type_ != c10::ScalarType::Undefined; }
  c10::ScalarType type() const { return type_; }

 private:
  Lease lease_;
  c10::ScalarType type_ = c10::ScalarType::Undefined;
  int64_t offset_ = 0;
  int64_t size_ = 0;
};

}  // namespace tenure::shard
