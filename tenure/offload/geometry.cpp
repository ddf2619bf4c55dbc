#include <tenure/offload/geometry.h>

#include <ATen/TensorSubclassLikeUtils.h>

#include <utility>

namespace tenure::offload {
namespace {

// Not at::isTensorSubclassLike, for which every tensor is one while a dispatch mode is on.
bool is_subclass(const at::Tensor& tensor) {
  return !(tensor.key_set() & at::kTensorSubclassLike).empty();
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_nested() && !tensor.is_quantized() &&
         !tensor.is_inference() && !is_subclass(tensor) && tensor.has_storage() &&
         tensor.storage().data() != nullptr;
}

Geometry geometry_of(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  return {.sizes = {sizes.begin(), sizes.end()},
          .strides = {strides.begin(), strides.end()},
          .offset = tensor.storage_offset(),
          .dtype = tensor.scalar_type()};
}

bool lies_so(const at::Tensor& tensor, const Geometry& geometry) {
  return tensor.sizes() == c10::IntArrayRef(geometry.sizes) &&
         tensor.strides() == c10::IntArrayRef(geometry.strides) &&
         tensor.storage_offset() == geometry.offset && tensor.scalar_type() == geometry.dtype;
}

at::Tensor tensor_on(c10::Storage storage, const Geometry& geometry) {
  const auto keys =
      c10::DispatchKeySet(c10::computeDispatchKey(geometry.dtype, c10::kStrided, storage.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys,
                                                   c10::scalarTypeToTypeMeta(geometry.dtype));
  impl->set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.offset);
  return at::Tensor(std::move(impl));
}

}  // namespace tenure::offload
