// What the bytes of an object are: dtype and shape, contiguous. Torch-free: dtypes have numbers
// and names of our own, which never change once given, because other versions read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tenure::store {

enum class Dtype : uint8_t {
  uint8 = 1,
  int8 = 2,
  int16 = 3,
  int32 = 4,
  int64 = 5,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  complex32 = 9,
  complex64 = 10,
  complex128 = 11,
  boolean = 12,
  bfloat16 = 13,
  float8_e5m2 = 14,
  float8_e4m3fn = 15,
  float8_e5m2fnuz = 16,
  float8_e4m3fnuz = 17,
  float8_e8m0fnu = 18,
  uint16 = 19,
  uint32 = 20,
  uint64 = 21,
  float4_e2m1fn_x2 = 22,
};
inline constexpr uint8_t kLastDtype = 22;

// Both throw InputError for a number that is no dtype. Bytes of an element:
size_t item_bytes(Dtype dtype);
// torch's name: "bfloat16", "bool".
std::string_view dtype_name(Dtype dtype);

inline constexpr size_t kMostDimensions = 64;

struct Layout {
  Dtype dtype = Dtype::uint8;
  std::vector<int64_t> shape;  // at most kMostDimensions, none negative

  bool operator==(const Layout&) const = default;
};

// "float32 [4096, 4096]"
std::string layout_text(const Layout& layout);

inline constexpr uint64_t kMostObjectBytes = uint64_t{1} << 62;

// Throws InputError for a layout whose bytes exceed 2^62 (sizes of 0 are not counted there: strides
// must not overflow), or with a negative or too many sizes.
uint64_t bytes_of(const Layout& layout);

// Rows of the first dimension. `count` of kAllRows: to the end.
inline constexpr uint64_t kAllRows = ~uint64_t{0};
struct Rows {
  uint64_t first = 0;
  uint64_t count = kAllRows;

  bool operator==(const Rows&) const = default;
  [[nodiscard]] bool all() const { return first == 0 && count == kAllRows; }
};

// The stretch of an object that `rows` are: where it begins, and its layout.
struct Extent {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  Layout layout;
};
// Throws InputError for rows beyond the object, or of an object without dimensions.
Extent extent_of(const Layout& layout, Rows rows);

}  // namespace tenure::store
