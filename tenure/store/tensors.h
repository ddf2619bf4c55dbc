// Between torch's tensors and the store's bytes. Any thread; none takes the GIL.
#pragma once

#include <tenure/store/client.h>
#include <tenure/store/layout.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace tenure::store {

at::ScalarType scalar_type_of(Dtype dtype);

// Throws InputError for a tensor that has no bytes to store (undefined, meta, sparse, quantized, a
// wrapper subclass), saying why it cannot be `verb`.
Layout layout_of(const at::Tensor& tensor, std::string_view verb);

// On the CPU, not filled.
at::Tensor empty_tensor(const Layout& layout);
// Keeps the mapping until its storage goes, or has other memory.
at::Tensor tensor_over(std::shared_ptr<const Mapping> mapping, const Layout& layout);

// The elements of a tensor on the CPU in row-major order, whatever its strides, as bytes from
// `offset` on. REQUIRES: offset and size are of whole elements.
void read_elements(const at::Tensor& tensor, uint64_t offset, std::span<std::byte> to);
// Of a contiguous tensor on the CPU.
std::span<const std::byte> bytes_of(const at::Tensor& tensor);
std::span<std::byte> writable_bytes_of(const at::Tensor& tensor);

}  // namespace tenure::store
