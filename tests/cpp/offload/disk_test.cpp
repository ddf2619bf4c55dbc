#include <tenure/offload/disk.h>

#include "later.h"
#include <tenure/core/scope.h>

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <limits>

namespace tenure::offload {
namespace {

using test::Later;

constexpr size_t kBytes = 100'000;

class DiskTest : public ::testing::Test {
 protected:
  HostCopy room() {
    return {pool_, kBytes, intern_owner(OwnerKind::host_copy, "test"), ScopeId::process};
  }
  static void fill(const HostCopy& copy, int value) {
    copy.for_each_piece([&](const c10::Storage& piece, const HostPool::Busy&) {
      std::memset(piece.mutable_data(), value, piece.nbytes());
    });
  }

  std::shared_ptr<HostPool> pool_ = std::make_shared<HostPool>(
      host_memory_for(c10::DeviceType::CPU), std::numeric_limits<uint64_t>::max());
  Disk disk_{std::filesystem::temp_directory_path().string()};
};

TEST_F(DiskTest, WritesWhatHasArrived) {
  const auto arrived = std::make_shared<Later>();
  auto copy = room();
  fill(copy, 7);
  const auto rest = disk_.put(std::move(copy), Fence(arrived));
  disk_.wait_for_writes(0);
  EXPECT_TRUE(arrived->ready());
}

// The memory may have been another storage's, whose copy is still on its way.
TEST_F(DiskTest, ReadsToWhereNoCopyWritesOrReads) {
  auto copy = room();
  fill(copy, 7);
  const auto rest = disk_.put(std::move(copy), Fence());
  disk_.wait_for_writes(0);
  const auto written = std::make_shared<Later>();
  const auto read = std::make_shared<Later>();
  const auto used = [&] {
    auto again = room();
    fill(again, 0);
    again.written_until(Fence(written));
    again.read_until(Fence(read));
    return again;
  };
  bool asked = false;
  disk_.with_bytes(rest, used, [&](HostCopy& back) {
    asked = true;
    EXPECT_TRUE(written->ready());
    EXPECT_TRUE(read->ready());
    back.for_each_piece([&](const c10::Storage& piece, const HostPool::Busy&) {
      EXPECT_EQ(static_cast<const char*>(piece.data())[piece.nbytes() - 1], 7);
    });
  });
  EXPECT_TRUE(asked);
}

}  // namespace
}  // namespace tenure::offload
