#include <tenure/offload/saved.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <c10/core/TensorImpl.h>

namespace tenure::offload {

SavedStorage::SavedStorage(const c10::Storage& storage, c10::Stream stream)
    : original(storage), compute(stream) {}

SavedStorage::~SavedStorage() {
  // Fetched and never asked for: whoever gets the memory next is behind the copy into it.
  if (fetched.held()) {
    arrived.wait(compute);
  }
}

Saved::Saved(const at::Tensor& tensor) : dtype_(tensor.scalar_type()) {
  if (!tensor.is_inference()) {
    counter_ = tensor.unsafeGetTensorImpl()->version_counter();
    version_ = counter_.current_version();
  }
}

void Saved::remember_view(const at::Tensor& tensor) {
  sizes_.assign(tensor.sizes().begin(), tensor.sizes().end());
  strides_.assign(tensor.strides().begin(), tensor.strides().end());
  offset_ = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  conj_ = tensor.is_conj();
  neg_ = tensor.is_neg();
}

// Hooks on saved tensors switch PyTorch's own check off, for all that is saved under them.
void Saved::require_unchanged() const {
  if (!counter_.enabled() || counter_.current_version() == version_) {
    return;
  }
  std::string shape;
  for (const auto size : sizes_) {
    shape += text(shape.empty() ? "" : ", ", size);
  }
  throw MutationError(text(
      "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: the saved tensor of ",
      c10::toString(dtype_), " [", shape, "] is at version ", counter_.current_version(),
      "; expected version ", version_,
      " instead. Make the operation that writes to it out of place, or clone the tensor first"));
}

// The saved view, on a storage that holds the original's content from `begin` on.
at::Tensor Saved::view_of(c10::Storage storage, size_t begin) const {
  const auto keys =
      c10::DispatchKeySet(c10::computeDispatchKey(dtype_, c10::kStrided, storage.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys,
                                                   c10::scalarTypeToTypeMeta(dtype_));
  const auto offset = (offset_ - begin) / c10::elementSize(dtype_);
  impl->set_sizes_and_strides(sizes_, strides_, static_cast<int64_t>(offset));
  if (conj_) {
    impl->_set_conj(true);
  }
  if (neg_) {
    impl->_set_neg(true);
  }
  return at::Tensor(std::move(impl));
}

}  // namespace tenure::offload
