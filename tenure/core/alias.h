// Alias: a tensor that is kept past a call. What keeps its storage alive is a lease, and the tensor
// itself is made anew whenever it is wanted: no autograd graph, no gradient, no version is kept.
// Belongs to one thread at a time.
#pragma once

#include <tenure/core/hold.h>
#include <tenure/core/scope.h>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace tenure {

class Alias {
 public:
  Alias() = default;
  // Throws LeaseError for a tensor without a storage of its own.
  Alias(const at::Tensor& tensor, OwnerId owner, ScopeId scope = ScopeId::process);

  // With a version counter of its own. Also of a released storage.
  at::Tensor tensor() const;
  bool defined() const { return type_ != c10::ScalarType::Undefined; }
  c10::ScalarType type() const { return type_; }
  const Lease& lease() const { return lease_; }

 private:
  Lease lease_;
  c10::ScalarType type_ = c10::ScalarType::Undefined;
  bool conjugate_ = false;
  bool negative_ = false;
  int64_t offset_ = 0;
  c10::SmallVector<int64_t, 5> sizes_;
  c10::SmallVector<int64_t, 5> strides_;
};

}  // namespace tenure
