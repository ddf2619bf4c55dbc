#include <tenure/shard/alias.h>

#include <ATen/ops/empty.h>

namespace tenure::shard {

at::Tensor part(const at::Tensor& tensor, Range range) {
  return tensor.narrow(0, static_cast<int64_t>(range.begin), static_cast<int64_t>(range.size));
}

at::Tensor Alias::tensor() const {
  const auto storage = lease_.storage();
  auto out = at::empty({0}, at::TensorOptions(type_).device(storage.device()));
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset_);
  impl->set_sizes_contiguous({size_});
  return out;
}

}  // namespace tenure::shard
