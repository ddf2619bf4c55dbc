#include <tenure/store/tensors.h>

#include <tenure/core/error.h>
#include <tenure/core/storage_ref.h>
#include <tenure/core/text.h>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <utility>

namespace tenure::store {

namespace {

struct Pair {
  Dtype ours;
  at::ScalarType torchs;
};

constexpr std::array kPairs = {
    Pair{Dtype::uint8, at::ScalarType::Byte},
    Pair{Dtype::int8, at::ScalarType::Char},
    Pair{Dtype::int16, at::ScalarType::Short},
    Pair{Dtype::int32, at::ScalarType::Int},
    Pair{Dtype::int64, at::ScalarType::Long},
    Pair{Dtype::float16, at::ScalarType::Half},
    Pair{Dtype::float32, at::ScalarType::Float},
    Pair{Dtype::float64, at::ScalarType::Double},
    Pair{Dtype::complex32, at::ScalarType::ComplexHalf},
    Pair{Dtype::complex64, at::ScalarType::ComplexFloat},
    Pair{Dtype::complex128, at::ScalarType::ComplexDouble},
    Pair{Dtype::boolean, at::ScalarType::Bool},
    Pair{Dtype::bfloat16, at::ScalarType::BFloat16},
    Pair{Dtype::float8_e5m2, at::ScalarType::Float8_e5m2},
    Pair{Dtype::float8_e4m3fn, at::ScalarType::Float8_e4m3fn},
    Pair{Dtype::float8_e5m2fnuz, at::ScalarType::Float8_e5m2fnuz},
    Pair{Dtype::float8_e4m3fnuz, at::ScalarType::Float8_e4m3fnuz},
    Pair{Dtype::float8_e8m0fnu, at::ScalarType::Float8_e8m0fnu},
    Pair{Dtype::uint16, at::ScalarType::UInt16},
    Pair{Dtype::uint32, at::ScalarType::UInt32},
    Pair{Dtype::uint64, at::ScalarType::UInt64},
    Pair{Dtype::float4_e2m1fn_x2, at::ScalarType::Float4_e2m1fn_x2},
};

Dtype dtype_of(at::ScalarType type, std::string_view verb) {
  for (const auto& pair : kPairs) {
    if (pair.torchs == type) {
      return pair.ours;
    }
  }
  throw InputError(text("a tensor of type ", type, " cannot be ", verb, ": convert it first"));
}

// As many elements from the first on: parts of rows one by one, whole rows at once.
void copy_elements(const at::Tensor& from, int64_t first, int64_t count, std::byte* to) {
  if (count == 0) {
    return;
  }
  if (count == from.numel()) {
    at::from_blob(to, from.sizes(), from.options()).copy_(from);
    return;
  }
  const auto row = from.numel() / from.size(0);
  const auto at = first / row;
  const auto within = first % row;
  const bool whole = within == 0 && count >= row;
  const auto some = whole ? count / row * row : std::min(count, row - within);
  copy_elements(whole ? from.narrow(0, at, count / row) : from.select(0, at), whole ? 0 : within,
                some, to);
  copy_elements(from, first + some, count - some, to + (some * from.itemsize()));
}

}  // namespace

at::ScalarType scalar_type_of(Dtype dtype) {
  for (const auto& pair : kPairs) {
    if (pair.ours == dtype) {
      return pair.torchs;
    }
  }
  throw InputError(text("dtype ", static_cast<int>(dtype), " is not known to this version"));
}

Layout layout_of(const at::Tensor& tensor, std::string_view verb) {
  try {
    (void)storage_of(tensor, verb);
  } catch (const LeaseError& error) {
    throw InputError(error.what());
  }
  const auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                       tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) {
    throw InputError(text("this tensor cannot be ", verb,
                          ": it reaches beyond its storage, which has ",
                          bytes_text(tensor.storage().nbytes()), " of ", bytes_text(needed),
                          "; was the storage resized?"));
  }
  const auto sizes = tensor.sizes();
  return {.dtype = dtype_of(tensor.scalar_type(), verb), .shape = {sizes.begin(), sizes.end()}};
}

at::Tensor empty_tensor(const Layout& layout) {
  return at::empty(layout.shape, at::TensorOptions().dtype(scalar_type_of(layout.dtype)));
}

at::Tensor tensor_over(std::shared_ptr<const Mapping> mapping, const Layout& layout) {
  auto* const data = mapping->data();
  const auto options = at::TensorOptions().dtype(scalar_type_of(layout.dtype));
  return at::from_blob(
      data, layout.shape, [held = std::move(mapping)](void* /*data*/) mutable { held.reset(); },
      options);
}

void read_elements(const at::Tensor& tensor, uint64_t offset, std::span<std::byte> to) {
  const auto item = static_cast<int64_t>(tensor.itemsize());
  copy_elements(tensor, static_cast<int64_t>(offset) / item, static_cast<int64_t>(to.size()) / item,
                to.data());
}

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

std::span<std::byte> writable_bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

}  // namespace tenure::store
