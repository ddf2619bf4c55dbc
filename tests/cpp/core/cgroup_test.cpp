#include <tenure/core/cgroup.h>

#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <set>
#include <string>

namespace tenure {
namespace {

constexpr const char* kV2Mount =
    "29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 "
    "rw,nsdelegate\n";
constexpr const char* kV1Mounts =
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

TEST(FindMemoryCgroup, Version2) {
  const auto place = find_memory_cgroup("0::/user.slice/job.scope\n", kV2Mount);
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->version, CgroupVersion::v2);
  EXPECT_EQ(place->mount, "/sys/fs/cgroup");
  EXPECT_EQ(place->directory, "/sys/fs/cgroup/user.slice/job.scope");
}

TEST(FindMemoryCgroup, Version2InsideANamespace) {
  const auto place = find_memory_cgroup("0::/\n", kV2Mount);
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->directory, "/sys/fs/cgroup");
}

TEST(FindMemoryCgroup, WhereBothVersionsAreMountedTheControllerDecides) {
  const auto place =
      find_memory_cgroup("9:name=systemd:/\n4:memory:/jobs/7\n1:cpu,cpuacct:/\n0::/\n", kV1Mounts);
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->version, CgroupVersion::v1);
  EXPECT_EQ(place->directory, "/sys/fs/cgroup/memory/jobs/7");
}

TEST(FindMemoryCgroup, AContainerSeesItsOwnGroupAsTheMount) {
  const auto place = find_memory_cgroup(
      "4:memory:/docker/abc\n",
      "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory\n");
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->directory, "/sys/fs/cgroup/memory");
}

TEST(FindMemoryCgroup, ANameThatOnlyBeginsLikeTheRootIsNotBelowIt) {
  const auto place = find_memory_cgroup(
      "4:memory:/docker/abcd\n",
      "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->directory, "/sys/fs/cgroup/memory");
}

TEST(FindMemoryCgroup, APathOutsideTheNamespaceFallsBackToTheMount) {
  const auto place = find_memory_cgroup("0::/../../other\n", kV2Mount);
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->directory, "/sys/fs/cgroup");
}

TEST(FindMemoryCgroup, UnescapesMountPoints) {
  const auto place =
      find_memory_cgroup("0::/\n", "29 23 0:26 / /a\\040b\\134c rw - cgroup2 cgroup2 rw\n");
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->mount, "/a b\\c");
}

TEST(FindMemoryCgroup, NoControllerNoMountOrNonsenseIsAbsent) {
  EXPECT_FALSE(find_memory_cgroup("", kV2Mount).has_value());
  EXPECT_FALSE(find_memory_cgroup("1:cpu:/x\n", kV1Mounts).has_value());
  EXPECT_FALSE(find_memory_cgroup("0::/x\n", "").has_value());
  EXPECT_FALSE(find_memory_cgroup("no colons\n::\n", "29 23 -\n\n - -\n").has_value());
}

// A hierarchy of plain files with the kernel's names and spelling.
class Hierarchy : public testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + testing::UnitTest::GetInstance()->current_test_info()->name();
    for (const auto* folder : {"", "/pod", "/pod/job"}) {
      ASSERT_TRUE(mkdir((root_ + folder).c_str(), 0700) == 0 || errno == EEXIST);
    }
  }
  void TearDown() override {
    for (const auto& file : files_) {
      unlink(file.c_str());
    }
    for (const auto* folder : {"/pod/job", "/pod", ""}) {
      rmdir((root_ + folder).c_str());
    }
  }

  void write(const std::string& file, const std::string& content) {
    files_.insert(root_ + "/" + file);
    std::ofstream(root_ + "/" + file) << content;
  }
  [[nodiscard]] MemoryCgroup open(CgroupVersion version) const {
    return MemoryCgroup({version, root_, root_ + "/pod/job"});
  }

  std::string root_;
  std::set<std::string> files_;
};

TEST_F(Hierarchy, Version2TakesTheTightestLimitAndTheLeastHeadroom) {
  write("pod/job/memory.current", "1000\n");
  write("pod/job/memory.max", "5000\n");
  write("pod/memory.current", "7500\n");  // neighbours hold 6500 of it
  write("pod/memory.max", "8000\n");
  write("memory.current", "9000\n");
  write("memory.max", "max\n");
  const auto sample = open(CgroupVersion::v2).sample();
  ASSERT_TRUE(sample.has_value());
  EXPECT_EQ(sample->usage, 1000);
  EXPECT_EQ(sample->limit, 5000);
  EXPECT_EQ(sample->headroom, 500);
}

TEST_F(Hierarchy, MaxEverywhereIsNoLimit) {
  write("pod/job/memory.current", "1000\n");
  write("pod/job/memory.max", "max\n");
  write("pod/memory.current", "1000\n");
  write("pod/memory.max", "max\n");
  const auto sample = open(CgroupVersion::v2).sample();
  ASSERT_TRUE(sample.has_value());
  EXPECT_EQ(sample->usage, 1000);
  EXPECT_FALSE(sample->limit.has_value());
  EXPECT_FALSE(sample->headroom.has_value());
}

TEST_F(Hierarchy, AChangedLimitIsSeen) {
  write("pod/job/memory.current", "1000\n");
  write("pod/job/memory.max", "max\n");
  const auto cgroup = open(CgroupVersion::v2);
  write("pod/job/memory.max", "1500\n");
  EXPECT_EQ(cgroup.sample()->headroom, 500);
  write("pod/job/memory.max", "900\n");
  EXPECT_EQ(cgroup.sample()->headroom, 0);
}

TEST_F(Hierarchy, AGroupWithoutTheControllerIsAccountedInItsParent) {
  write("pod/memory.current", "3000\n");
  write("pod/memory.max", "4000\n");
  write("pod/memory.stat", "anon 10\nshmem 5\ninactive_file 77\n");
  const auto cgroup = open(CgroupVersion::v2);
  EXPECT_EQ(cgroup.sample()->usage, 3000);
  EXPECT_EQ(cgroup.sample()->limit, 4000);
  EXPECT_EQ(cgroup.inactive_file(), 77);
  EXPECT_EQ(cgroup.shared(), 5);
}

TEST_F(Hierarchy, Version1) {
  write("pod/job/memory.usage_in_bytes", "2048\n");
  write("pod/job/memory.limit_in_bytes", "9223372036854771712\n");
  write("pod/memory.usage_in_bytes", "4096\n");
  write("pod/memory.limit_in_bytes", "10000\n");
  write("memory.usage_in_bytes", "8192\n");
  write("memory.limit_in_bytes", "9223372036854710272\n");  // pages of 64 KiB
  write("pod/job/memory.stat", "shmem 2\ninactive_file 1\ntotal_shmem 8\ntotal_inactive_file 99\n");
  const auto cgroup = open(CgroupVersion::v1);
  const auto sample = cgroup.sample();
  ASSERT_TRUE(sample.has_value());
  EXPECT_EQ(sample->usage, 2048);
  EXPECT_EQ(sample->limit, 10000);
  EXPECT_EQ(sample->headroom, 10000 - 4096);
  EXPECT_EQ(cgroup.inactive_file(), 99);
  EXPECT_EQ(cgroup.shared(), 8);
}

TEST_F(Hierarchy, WithoutFilesThereIsNoSample) {
  EXPECT_FALSE(open(CgroupVersion::v1).sample().has_value());
  EXPECT_FALSE(open(CgroupVersion::v2).sample().has_value());
  EXPECT_FALSE(open(CgroupVersion::v2).inactive_file().has_value());
}

}  // namespace
}  // namespace tenure
