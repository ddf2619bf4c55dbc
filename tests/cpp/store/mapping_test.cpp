#include <tenure/store/mapping.h>

#include "objects_fixture.h"
#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <utility>

namespace tenure::store {
namespace {

constexpr int kSeals = F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK;

Descriptor file_of(const std::vector<std::byte>& bytes, int seals = kSeals) {
  Descriptor file(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::write(file.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  EXPECT_EQ(::fcntl(file.get(), F_ADD_SEALS, seals), 0);
  return file;
}

ObjectFound whole(uint64_t bytes) {
  return {
      .wish = 0, .layout = bytes_layout(bytes), .offset = 0, .bytes = bytes, .whole_bytes = bytes};
}

TEST(Mapping, APartBeginsWhereItShould) {
  const auto bytes = pattern(100'000);
  ObjectFound part = whole(100'000);
  part.offset = 5001;
  part.bytes = 70'001;
  const auto mapping = MappedFile::map(file_of(bytes), part);
  ASSERT_NE(mapping, nullptr);
  EXPECT_EQ(mapping->bytes(), 70'001U);
  EXPECT_EQ(std::memcmp(mapping->data(), bytes.data() + 5001, 70'001), 0);
}

TEST(Mapping, AWriteStaysWithTheWriter) {
  const auto bytes = pattern(100'000);
  auto file = file_of(bytes);
  const auto mine = MappedFile::map(Descriptor(::dup(file.get())), whole(100'000));
  const auto others = MappedFile::map(std::move(file), whole(100'000));
  mine->data()[50'000] ^= std::byte{1};
  EXPECT_EQ(others->data()[50'000], bytes[50'000]);
}

TEST(Mapping, OnlyAWriteMakesItDirty) {
  const auto mapping = MappedFile::map(file_of(pattern(40 << 20)), whole(40 << 20));
  EXPECT_FALSE(mapping->dirty());
  std::byte sum{};
  for (uint64_t i = 0; i < mapping->bytes(); i += 4096) {
    sum ^= mapping->data()[i];
  }
  EXPECT_FALSE(mapping->dirty()) << static_cast<int>(sum);
  mapping->data()[mapping->bytes() - 1] ^= std::byte{1};
  EXPECT_TRUE(mapping->dirty());
}

TEST(Mapping, AFileThatIsNotSealedIsNotTaken) {
  for (const int missing : {F_SEAL_WRITE, F_SEAL_GROW, F_SEAL_SHRINK}) {
    EXPECT_THROW(MappedFile::map(file_of(pattern(10'000), kSeals & ~missing), whole(10'000)),
                 Error);
  }
}

TEST(Mapping, AFileOfAnotherSizeIsNotTaken) {
  EXPECT_THROW(MappedFile::map(file_of(pattern(10'000)), whole(10'001)), Error);
  EXPECT_THROW(MappedFile::map(file_of(pattern(10'000)), whole(9'999)), Error);
}

TEST(Mapping, ItsEndIsTold) {
  bool told = false;
  auto mapping = MappedFile::map(file_of(pattern(10'000)), whole(10'000));
  MappedFile::set_tell(*mapping, [&](const Heirs& heirs) { told = heirs.empty(); });
  mapping.reset();
  EXPECT_TRUE(told);
}

}  // namespace
}  // namespace tenure::store
