#include <tenure/store/layout.h>

#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <set>
#include <string_view>

namespace tenure::store {
namespace {

constexpr int64_t kHuge = int64_t{1} << 62;

TEST(Layout, EveryDtypeHasANameAndASize) {
  std::set<std::string_view> names;
  for (int number = 1; number <= kLastDtype; ++number) {
    const auto dtype = static_cast<Dtype>(number);
    names.insert(dtype_name(dtype));
    EXPECT_GE(item_bytes(dtype), 1) << number;
  }
  EXPECT_EQ(names.size(), kLastDtype);
  EXPECT_EQ(dtype_name(Dtype::boolean), "bool");
  EXPECT_EQ(item_bytes(Dtype::complex128), 16);
  EXPECT_EQ(item_bytes(Dtype::bfloat16), 2);
  EXPECT_EQ(item_bytes(Dtype::float8_e8m0fnu), 1);
}

TEST(Layout, ANumberThatIsNoDtypeIsRefused) {
  EXPECT_THROW(item_bytes(static_cast<Dtype>(0)), InputError);
  EXPECT_THROW(dtype_name(static_cast<Dtype>(kLastDtype + 1)), InputError);
}

TEST(Layout, BytesAreOfAllElements) {
  EXPECT_EQ(bytes_of({.dtype = Dtype::float32, .shape = {4096, 4096}}), 64 << 20);
  EXPECT_EQ(bytes_of({.dtype = Dtype::float64, .shape = {}}), 8) << "one element";
  EXPECT_EQ(bytes_of({.dtype = Dtype::float64, .shape = {7, 0, 3}}), 0);
  EXPECT_EQ(bytes_of({.dtype = Dtype::uint8, .shape = {kHuge}}), kMostObjectBytes);
}

TEST(Layout, SizesThatCannotBeAreRefused) {
  EXPECT_THROW(bytes_of({.dtype = Dtype::uint8, .shape = {-1}}), InputError);
  EXPECT_THROW(bytes_of({.dtype = Dtype::uint8, .shape = {0, -1}}), InputError);
  EXPECT_THROW(bytes_of({.dtype = Dtype::uint8, .shape = {kHuge + 1}}), InputError);
  EXPECT_THROW(bytes_of({.dtype = Dtype::int16, .shape = {kHuge}}), InputError);
  EXPECT_THROW(bytes_of({.dtype = Dtype::uint8, .shape = {kHuge, kHuge, kHuge}}), InputError);
  EXPECT_THROW(bytes_of({.dtype = Dtype::uint8, .shape = {0, kHuge, 2}}), InputError)
      << "its strides would overflow";
}

TEST(Layout, DimensionsHaveALimit) {
  EXPECT_EQ(bytes_of({.dtype = Dtype::uint8, .shape = std::vector<int64_t>(64, 1)}), 1);
  EXPECT_THROW(bytes_of({.dtype = Dtype::uint8, .shape = std::vector<int64_t>(65, 1)}), InputError);
}

TEST(Layout, TextIsDtypeAndShape) {
  EXPECT_EQ(layout_text({.dtype = Dtype::float32, .shape = {4096, 3}}), "float32 [4096, 3]");
  EXPECT_EQ(layout_text({.dtype = Dtype::boolean, .shape = {}}), "bool []");
}

TEST(Layout, RowsAreAStretch) {
  const auto part =
      extent_of({.dtype = Dtype::float32, .shape = {10, 3}}, {.first = 4, .count = 2});
  EXPECT_EQ(part.offset, 48);
  EXPECT_EQ(part.bytes, 24);
  EXPECT_EQ(part.layout, (Layout{.dtype = Dtype::float32, .shape = {2, 3}}));
}

TEST(Layout, RowsToTheEndMayBeNone) {
  const Layout layout{.dtype = Dtype::float32, .shape = {10, 3}};
  EXPECT_EQ(extent_of(layout, {.first = 9}).bytes, 12);
  EXPECT_EQ(extent_of(layout, {.first = 10}).bytes, 0);
  EXPECT_EQ(extent_of(layout, {.first = 10}).layout.shape.front(), 0);
  EXPECT_EQ(extent_of(layout, {.first = 10, .count = 0}).offset, 120);
}

TEST(Layout, AllRowsAreTheWhole) {
  const Layout scalar{.dtype = Dtype::float32, .shape = {}};
  EXPECT_EQ(extent_of(scalar, {}).bytes, 4);
  EXPECT_EQ(extent_of(scalar, {}).layout, scalar);
  EXPECT_EQ(extent_of({.dtype = Dtype::float32, .shape = {0, 3}}, {}).bytes, 0);
  EXPECT_EQ(extent_of({.dtype = Dtype::float32, .shape = {0, 3}}, {.first = 0, .count = 0}).bytes,
            0);
}

TEST(Layout, RowsBeyondTheEndAreRefused) {
  const Layout layout{.dtype = Dtype::float32, .shape = {10, 3}};
  EXPECT_THROW(extent_of(layout, {.first = 11}), InputError);
  EXPECT_THROW(extent_of(layout, {.first = 4, .count = 7}), InputError);
  EXPECT_THROW(extent_of(layout, {.first = 4, .count = kAllRows - 1}), InputError);
  EXPECT_THROW(extent_of(layout, {.first = kAllRows, .count = 1}), InputError);
  EXPECT_THROW(extent_of({.dtype = Dtype::float32, .shape = {}}, {.first = 0, .count = 1}),
               InputError)
      << "no dimensions";
}

}  // namespace
}  // namespace tenure::store
