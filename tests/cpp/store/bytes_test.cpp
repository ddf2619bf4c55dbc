#include <tenure/store/bytes.h>

#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <string>

namespace tenure::store {
namespace {

using std::byte;

std::string refusal(const auto& read, std::span<const byte> bytes) {
  ByteReader in(bytes, "a test");
  try {
    read(in);
  } catch (const InputError& error) {
    return error.what();
  }
  return "taken";
}

TEST(Bytes, NumbersAreLittleEndianAndOfFixedWidth) {
  ByteWriter out;
  out.u8(0x01);
  out.u16(0x0302);
  out.u32(0x07060504);
  out.u64(0x0f0e0d0c0b0a0908);
  const auto bytes = out.take();
  ASSERT_EQ(bytes.size(), 15);
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_EQ(std::to_integer<size_t>(bytes[i]), i + 1);
  }
}

TEST(Bytes, WhatIsWrittenIsRead) {
  ByteWriter out;
  out.u8(0xff);
  out.u16(0xffff);
  out.u32(0xffffffff);
  out.u64(std::numeric_limits<uint64_t>::max());
  out.text("trainer");
  out.long_text("a\nlonger\ttext");
  out.raw(std::array{byte{1}, byte{2}});
  const auto bytes = out.take();

  ByteReader in(bytes, "a test");
  EXPECT_EQ(in.u8(), 0xff);
  EXPECT_EQ(in.u16(), 0xffff);
  EXPECT_EQ(in.u32(), 0xffffffff);
  EXPECT_EQ(in.u64(), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(in.line(7), "trainer");
  EXPECT_EQ(in.long_prose(100), "a\nlonger\ttext");
  std::array<byte, 2> raw{};
  in.raw(raw);
  EXPECT_EQ(raw[1], byte{2});
  EXPECT_NO_THROW(in.finish());
}

TEST(Bytes, AReadBeyondTheEndNamesWhatWasRead) {
  const std::array<byte, 3> bytes{};
  EXPECT_EQ(refusal([](ByteReader& in) { in.u32(); }, bytes),
            "a test cannot be read: it ends too early");
  EXPECT_EQ(refusal([](ByteReader& in) { in.raw(4); }, bytes),
            "a test cannot be read: it ends too early");
}

TEST(Bytes, WhatIsLeftOverIsRefused) {
  const std::array<byte, 3> bytes{};
  const auto one = [](ByteReader& in) {
    in.u8();
    in.finish();
  };
  EXPECT_EQ(refusal(one, bytes), "a test cannot be read: bytes are left over at its end: 2");
}

TEST(Bytes, ALengthIsCheckedAgainstItsLimitBeforeTheBytes) {
  std::array<byte, 4> bytes{};
  bytes.fill(byte{0xff});
  EXPECT_EQ(
      refusal([](ByteReader& in) { in.long_prose(100); }, bytes),
      "a test cannot be read: a text in it has 4294967295 bytes, and at most 100 belong there");
  EXPECT_EQ(refusal([](ByteReader& in) { in.count(100, 25); }, bytes),
            "a test cannot be read: it says that it has 4294967295 items, and at most 100 belong "
            "there");
}

TEST(Bytes, ACountNeedsTheBytesOfItsItems) {
  ByteWriter out;
  out.u32(3);
  out.raw(std::array<byte, 8>{});
  const auto bytes = out.take();
  EXPECT_EQ(refusal([](ByteReader& in) { in.count(100, 3); }, bytes),
            "a test cannot be read: it ends too early");
  EXPECT_EQ(refusal([](ByteReader& in) { in.count(100, 2); }, bytes), "taken");
}

TEST(Bytes, AFlagIsZeroOrOne) {
  EXPECT_EQ(refusal([](ByteReader& in) { in.flag(); }, std::array{byte{1}}), "taken");
  EXPECT_EQ(refusal([](ByteReader& in) { in.flag(); }, std::array{byte{2}}),
            "a test cannot be read: a flag in it is neither 0 nor 1");
}

TEST(Bytes, ANameHasNoLineBreakAndProseMay) {
  ByteWriter out;
  out.text("two\nlines");
  const auto bytes = out.take();
  EXPECT_EQ(refusal([](ByteReader& in) { in.line(100); }, bytes),
            "a test cannot be read: a name in it is not UTF-8, or has control characters");
  EXPECT_EQ(refusal([](ByteReader& in) { in.prose(100); }, bytes), "taken");
}

TEST(Bytes, ATextThatItsLengthCannotSayIsNotWritten) {
  ByteWriter out;
  EXPECT_NO_THROW(out.text(std::string(65'535, 'a')));
  EXPECT_THROW(out.text(std::string(65'536, 'a')), InputError);
}

}  // namespace
}  // namespace tenure::store
