// Taking leases on tensors: how the rest of Tenure keeps a storage alive. Any thread.
#pragma once

#include <tenure/core/lease.h>

namespace at {
class Tensor;
}  // namespace at

namespace tenure {

// Leases the tensor's storage, and nothing else of the tensor: no autograd graph, no gradient.
// In the current scope, or in `scope` (the process scope if that is closed). Throws LeaseError for
// a tensor without a storage of its own.
Lease hold(const at::Tensor& tensor, OwnerId owner);
Lease hold(const at::Tensor& tensor, OwnerId owner, ScopeId scope);
Lease hold(const c10::Storage& storage, OwnerId owner, ScopeId scope);

}  // namespace tenure
