// Geometry: how a tensor lies on its storage. A value.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace tenure::offload {

struct Geometry {
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  int64_t offset = 0;  // in elements
  c10::ScalarType dtype = c10::ScalarType::Undefined;

  bool operator==(const Geometry&) const = default;
};

Geometry geometry_of(const at::Tensor& tensor);
bool lies_so(const at::Tensor& tensor, const Geometry& geometry);

// A plain tensor that lies so on that storage.
at::Tensor tensor_on(c10::Storage storage, const Geometry& geometry);

// Whether it is a view of one storage and no more than that.
bool is_plain(const at::Tensor& tensor);

}  // namespace tenure::offload
