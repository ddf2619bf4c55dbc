#include <tenure/core/alias.h>

#include <ATen/ops/empty.h>

namespace tenure {

Alias::Alias(const at::Tensor& tensor, OwnerId owner, ScopeId scope)
    : lease_(hold(tensor, owner, scope)),
      type_(tensor.scalar_type()),
      conjugate_(tensor.is_conj()),
      negative_(tensor.is_neg()),
      offset_(tensor.storage_offset()),
      sizes_(tensor.sizes().begin(), tensor.sizes().end()),
      strides_(tensor.strides().begin(), tensor.strides().end()) {}

at::Tensor Alias::tensor() const {
  const auto storage = lease_.storage();
  auto out = at::empty({0}, at::TensorOptions(type_).device(storage.device()));
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset_);
  impl->set_sizes_and_strides(sizes_, strides_);
  if (conjugate_) {
    out._set_conj(true);
  }
  if (negative_) {
    out._set_neg(true);
  }
  return out;
}

}  // namespace tenure
