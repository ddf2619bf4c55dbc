#include <tenure/store/layout.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <array>
#include <string>

namespace tenure::store {
namespace {

struct DtypeFacts {
  std::string_view name;
  uint8_t bytes = 0;
};

// By number; 0 is none.
constexpr std::array<DtypeFacts, kLastDtype + 1> kDtypes{{
    {},
    {"uint8", 1},
    {"int8", 1},
    {"int16", 2},
    {"int32", 4},
    {"int64", 8},
    {"float16", 2},
    {"float32", 4},
    {"float64", 8},
    {"complex32", 4},
    {"complex64", 8},
    {"complex128", 16},
    {"bool", 1},
    {"bfloat16", 2},
    {"float8_e5m2", 1},
    {"float8_e4m3fn", 1},
    {"float8_e5m2fnuz", 1},
    {"float8_e4m3fnuz", 1},
    {"float8_e8m0fnu", 1},
    {"uint16", 2},
    {"uint32", 4},
    {"uint64", 8},
    {"float4_e2m1fn_x2", 1},
}};

const DtypeFacts& facts_of(Dtype dtype) {
  const auto number = static_cast<uint8_t>(dtype);
  if (number == 0 || number > kLastDtype) {
    throw InputError(text("dtype ", int{number}, " is unknown to this version of the store"));
  }
  return kDtypes[number];
}

}  // namespace

size_t item_bytes(Dtype dtype) { return facts_of(dtype).bytes; }

std::string_view dtype_name(Dtype dtype) { return facts_of(dtype).name; }

std::string layout_text(const Layout& layout) {
  std::string sizes;
  for (const int64_t size : layout.shape) {
    sizes += sizes.empty() ? text(size) : text(", ", size);
  }
  return text(dtype_name(layout.dtype), " [", sizes, ']');
}

uint64_t bytes_of(const Layout& layout) {
  if (layout.shape.size() > kMostDimensions) {
    throw InputError(text("a tensor has ", layout.shape.size(), " dimensions: at most ",
                          kMostDimensions, " are allowed"));
  }
  uint64_t bytes = item_bytes(layout.dtype);
  bool none = false;
  for (const int64_t size : layout.shape) {
    if (size < 0) {
      throw InputError(text("a tensor has a negative size: ", layout_text(layout)));
    }
    if (size == 0) {
      none = true;
      continue;
    }
    if (static_cast<uint64_t>(size) > kMostObjectBytes / bytes) {
      throw InputError(text("a tensor has sizes beyond 2^62 bytes: ", layout_text(layout)));
    }
    bytes *= static_cast<uint64_t>(size);
  }
  return none ? 0 : bytes;
}

Extent extent_of(const Layout& layout, Rows rows) {
  const uint64_t bytes = bytes_of(layout);
  if (rows.all()) {
    return {.offset = 0, .bytes = bytes, .layout = layout};
  }
  if (layout.shape.empty()) {
    throw InputError(text("rows of a tensor without dimensions were asked for: ",
                          layout_text(layout), ". Fetch all of it"));
  }
  const auto there = static_cast<uint64_t>(layout.shape.front());
  const bool to_end = rows.count == kAllRows;
  if (rows.first > there || (!to_end && rows.count > there - rows.first)) {
    const auto last = to_end ? std::string("the end") : text(rows.count, " more");
    throw InputError(text("rows from ", rows.first, " to ", last, " were asked for, and there are ",
                          there, ": ", layout_text(layout)));
  }
  const uint64_t count = to_end ? there - rows.first : rows.count;
  const uint64_t row_bytes = there == 0 ? 0 : bytes / there;
  Extent extent{.offset = rows.first * row_bytes, .bytes = count * row_bytes, .layout = layout};
  extent.layout.shape.front() = static_cast<int64_t>(count);
  return extent;
}

}  // namespace tenure::store
