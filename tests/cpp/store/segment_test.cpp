#include <tenure/store/segment.h>

#include "objects_fixture.h"
#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>

namespace tenure::store {
namespace {

class Segments : public testing::Test {
 protected:
  std::shared_ptr<Room> room = Room::make(0, [] { return Vacancy(); });

  std::shared_ptr<const Content> segment(std::span<const std::byte> bytes) {
    std::string lack;
    auto charge = must(room->take(segment_bytes(bytes.size()), lack));
    return make_segment(Source(bytes), charge);
  }
};

TEST_F(Segments, ItsWholeIsTheObject) {
  const auto bytes = pattern(100'000);
  const auto content = segment(bytes);
  struct stat what{};
  ASSERT_EQ(::fstat(content->descriptor(), &what), 0);
  EXPECT_EQ(static_cast<uint64_t>(what.st_size), bytes.size());
  EXPECT_EQ(read_whole(*content), bytes);
  EXPECT_EQ(content->file(), content->descriptor());
}

TEST_F(Segments, NobodyCanWriteToIt) {
  const auto content = segment(pattern(100'000));
  EXPECT_EQ(::pwrite(content->descriptor(), "x", 1, 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, content->descriptor(), 0),
            MAP_FAILED);
}

TEST_F(Segments, NobodyCanMakeItShorterOrLonger) {
  const auto content = segment(pattern(100'000));
  EXPECT_EQ(::ftruncate(content->descriptor(), 50'000), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(content->descriptor(), 200'000), -1);
  EXPECT_EQ(errno, EPERM);
}

TEST_F(Segments, AMapOutlivesTheContentUnchanged) {
  const auto bytes = pattern(100'000);
  auto content = segment(bytes);
  void* map = ::mmap(nullptr, bytes.size(), PROT_READ, MAP_PRIVATE, content->descriptor(), 0);
  ASSERT_NE(map, MAP_FAILED);
  content = nullptr;
  const auto other = segment(pattern(100'000, 2));
  EXPECT_EQ(std::memcmp(map, bytes.data(), bytes.size()), 0);
  ::munmap(map, bytes.size());
}

TEST_F(Segments, WholePagesAreChargedAndGivenBack) {
  auto content = segment(pattern(100'001));
  EXPECT_EQ(room->held(), 25U * 4096);
  content = nullptr;
  EXPECT_EQ(room->held(), 0U);
}

TEST_F(Segments, ASourceThatThrowsLeavesNothing) {
  const int next = ::dup(0);
  ::close(next);
  const Fill fill = [](uint64_t offset, std::span<std::byte>) {
    if (offset > 0) {
      throw std::domain_error("no");
    }
  };
  {
    std::string lack;
    auto charge = must(room->take(1 << 20, lack));
    EXPECT_THROW(make_segment(Source(1 << 20, 1000, fill), charge), std::domain_error);
  }
  EXPECT_EQ(room->held(), 0U);
  const int now = ::dup(0);
  ::close(now);
  EXPECT_EQ(now, next) << "a descriptor is left open";
}

TEST_F(Segments, WithoutADescriptorThereIsNoneAndTheChargeStays) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  std::string lack;
  auto charge = must(room->take(1 << 20, lack));
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto content = make_segment(Source(pattern(1 << 20)), charge);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(content, nullptr);
  EXPECT_EQ(charge.bytes(), 1U << 20);
}

TEST_F(Segments, BytesBeyondItsEndAreRefused) {
  const auto content = segment(pattern(100));
  std::byte to[10];
  EXPECT_THROW(content->read(95, to), Error);
}

}  // namespace
}  // namespace tenure::store
