#include <tenure/offload/saved.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace tenure::offload {
namespace {

// torch does not tell whether two counters are one, but each is a pointer and no more.
const void* address_of(const c10::VariableVersion& counter) {
  static_assert(sizeof(counter) == sizeof(void*));
  const void* out = nullptr;
  std::memcpy(static_cast<void*>(&out), static_cast<const void*>(&counter), sizeof(out));
  return out;
}

}  // namespace

SavedStorage::SavedStorage(const c10::Storage& storage, c10::Stream stream)
    : original(storage), original_bytes(storage.nbytes()), compute(stream) {}

SavedStorage::~SavedStorage() {
  if (!fetched.held()) {
    return;
  }
  // Fetched and never asked for: whoever gets the memory next is behind the copy into it.
  try {
    arrived.wait(compute);
  } catch (const c10::Error&) {
    return;  // a device that has failed copies nothing any more
  }
}

Version::Version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    counter_ = tensor.unsafeGetTensorImpl()->version_counter();
    number_ = counter_.current_version();
  }
}

bool Version::operator==(const Version& other) const {
  return counter_.enabled() && number_ == other.number_ &&
         address_of(counter_) == address_of(other.counter_);
}

Saved::Saved(const at::Tensor& tensor) : version_(tensor), dtype_(tensor.scalar_type()) {}

void Saved::remember_view(const at::Tensor& tensor) {
  original_ = tensor.getIntrusivePtr();
  sizes_.assign(tensor.sizes().begin(), tensor.sizes().end());
  strides_.assign(tensor.strides().begin(), tensor.strides().end());
  offset_ = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  conj_ = tensor.is_conj();
  neg_ = tensor.is_neg();
}

// Hooks on saved tensors switch PyTorch's own check off, for all that is saved under them.
void Saved::require_unchanged() const {
  if (version_.is_current()) {
    return;
  }
  std::string shape;
  for (const auto size : sizes_) {
    shape += text(shape.empty() ? "" : ", ", size);
  }
  throw MutationError(text(
      "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: the saved tensor of ",
      c10::toString(dtype_), " [", shape, "] is at version ", version_.now(), "; expected version ",
      version_.number(),
      " instead. Make the operation that writes to it out of place, or clone the tensor first"));
}

at::Tensor Saved::original() const {
  at::Tensor out(original_.lock());
  if (!out.defined() || !out.has_storage() || out.scalar_type() != dtype_ ||
      out.sizes() != c10::IntArrayRef(sizes_) || out.strides() != c10::IntArrayRef(strides_) ||
      static_cast<size_t>(out.storage_offset()) * out.itemsize() != offset_ ||
      out.is_conj() != conj_ || out.is_neg() != neg_) {
    return {};
  }
  return out;
}

at::Tensor Saved::view_of(c10::Storage storage, size_t begin,
                          const c10::VariableVersion& counter) const {
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
  impl->set_version_counter(counter);
  return at::Tensor(std::move(impl));
}

}  // namespace tenure::offload
