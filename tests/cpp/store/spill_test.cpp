#include <tenure/store/spill.h>

#include "objects_fixture.h"
#include <tenure/core/error.h>
#include <tenure/core/quiet_thread.h>
#include <tenure/store/objects.h>

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <system_error>
#include <thread>

namespace tenure::store {
namespace {

constexpr uint64_t kSmall = 64 << 10;

TEST(Spilled, LargeAndSmallComeBackByteExact) {
  Spill spill("", kSmall);
  for (const uint64_t bytes : {1, 4096, 65'536, 65'537, 3'000'000}) {
    const auto whole = pattern(bytes, bytes);
    const auto content = spill.store(Source(whole));
    EXPECT_EQ(read_whole(*content), whole) << bytes;
    std::vector<std::byte> part(bytes / 2);
    content->read(bytes - part.size(), part);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.end() - bytes / 2));
  }
}

TEST(Spilled, ALargeOnesFileIsTheObjectAndHasNoName) {
  Spill spill("", kSmall);
  const auto content = spill.store(Source(pattern(100'000)));
  struct stat what{};
  ASSERT_EQ(::fstat(content->file(), &what), 0);
  EXPECT_EQ(what.st_size, 100'000);
  EXPECT_EQ(what.st_nlink, 0U);
  EXPECT_EQ(content->descriptor(), -1) << "it is not sealed, and not for others";
}

ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

TEST(Spilled, SmallOnesShareADescriptor) {
  Spill spill("", kSmall);
  const auto before = open_descriptors();
  std::vector<std::shared_ptr<const Content>> all;
  for (int i = 0; i < 100; ++i) {
    all.push_back(spill.store(Source(pattern(5000, i))));
  }
  EXPECT_LE(open_descriptors(), before + 1);
  for (int i = 0; i < 100; i += 2) {
    all[i] = nullptr;
  }
  for (int i = 0; i < 100; i += 2) {
    all[i] = spill.store(Source(pattern(3000, i + 1000)));
  }
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(read_whole(*all[i]), i % 2 == 0 ? pattern(3000, i + 1000) : pattern(5000, i));
  }
}

TEST(Spilled, WhatEndsIsOffTheDisk) {
  Spill spill("", kSmall);
  auto large = spill.store(Source(pattern(100'000)));
  auto small = spill.store(Source(pattern(5000)));
  EXPECT_EQ(spill.bytes(), 25U * 4096 + 2 * 4096);
  large = nullptr;
  EXPECT_EQ(spill.bytes(), 2U * 4096);
  small = nullptr;
  EXPECT_EQ(spill.bytes(), 0U);
}

TEST(Spilled, AFolderThatIsNotThereIsRefused) {
  const auto what = what_of<InputError>([] { Spill spill("/no/such/folder", kSmall); });
  EXPECT_NE(what.find("/no/such/folder"), std::string::npos) << what;
}

TEST(Spilled, AFolderInMemoryIsRefused) {
  if (!std::filesystem::is_directory("/dev/shm")) {
    GTEST_SKIP() << "no /dev/shm here";
  }
  const auto what = what_of<InputError>([] { Spill spill("/dev/shm", kSmall); });
  EXPECT_NE(what.find("lies in memory"), std::string::npos) << what;
}

TEST(Spilling, TheOldestMakeRoomForTheNewAndAllComeBack) {
  Objects objects(kOwner, capped(4 << 20, WhenFull::spill));
  const auto reader = objects.admit(trainer(0));
  std::vector<ObjectId> ids;
  for (int i = 0; i < 20; ++i) {
    ids.push_back(put(objects, step(1), 1 << 20, anyone(), "", i + 1).id);
    EXPECT_LE(objects.stats().bytes, 4U << 20);
  }
  const auto all = objects.list(0, 100, nullptr);
  EXPECT_EQ(all.front().place, "disk");
  EXPECT_EQ(all.back().place, "memfd");
  EXPECT_EQ(objects.stats().spilled_bytes, 16U << 20);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(read_whole(*objects.fetch(reader, ids[i], {}).content), pattern(1 << 20, i + 1));
  }
  objects.close(step(1), kController);
  EXPECT_EQ(objects.stats().spilled_bytes, 0U);
  EXPECT_EQ(objects.stats().bytes, 0U);
}

TEST(Spilling, SmallOnesAreSpilledToo) {
  Objects objects(kOwner, capped(1 << 20, WhenFull::spill));
  const auto reader = objects.admit(trainer(0));
  std::vector<ObjectId> ids;
  for (int i = 0; i < 1000; ++i) {
    ids.push_back(put(objects, step(1), 4000, anyone(), "", i + 1).id);
  }
  EXPECT_LE(objects.stats().bytes, 1U << 20);
  for (int i = 0; i < 1000; ++i) {
    ASSERT_EQ(read_whole(*objects.fetch(reader, ids[i], {}).content), pattern(4000, i + 1)) << i;
  }
}

TEST(Spilling, OneThatIsLargerThanTheCapGoesStraightToDisk) {
  Objects objects(kOwner, capped(1 << 20, WhenFull::spill));
  const auto placed = put(objects, step(1), 3 << 20);
  EXPECT_EQ(objects.list(0, 1, nullptr).at(0).place, "disk");
  const auto fetched = objects.fetch(objects.admit(trainer(0)), placed.id, {});
  EXPECT_EQ(read_whole(*fetched.content), pattern(3 << 20));
}

TEST(Spilling, WhatIsBeingFetchedOrMappedStays) {
  Objects objects(kOwner, capped(3 << 20, WhenFull::spill));
  const auto reader = objects.admit(trainer(0));
  const auto fetching = objects.fetch(reader, put(objects, step(1), 1 << 20).id, {});
  objects.mapped(reader, put(objects, step(1), 1 << 20).id);
  put(objects, step(1), 1 << 20);
  put(objects, step(1), 1 << 20);
  const auto all = objects.list(0, 10, nullptr);
  EXPECT_EQ(all[0].place, "memfd");
  EXPECT_EQ(all[1].place, "memfd");
  EXPECT_EQ(all[2].place, "disk");
}

// A spilled file that is being written, or has been.
bool has_spilled_file() {
  return std::ranges::any_of(
      std::filesystem::directory_iterator("/proc/self/fd"), [](const auto& entry) {
        std::error_code gone;
        const auto target = std::filesystem::read_symlink(entry.path(), gone).string();
        return !gone && target.ends_with("(deleted)") && !target.starts_with("/memfd:");
      });
}

TEST(Spilling, WhatIsMappedWhileItIsSpilledStays) {
  Objects objects(kOwner, capped(48 << 20, WhenFull::spill));
  const auto reader = objects.admit(trainer(0));
  const auto large = put(objects, step(1), 32 << 20).id;
  auto putter = quiet_thread("a putter", [&] { put(objects, step(2), 32 << 20); });
  while (!has_spilled_file()) {
    std::this_thread::yield();
  }
  auto fetched = objects.fetch(reader, large, {});
  if (fetched.content->descriptor() < 0) {
    GTEST_SKIP() << "it was on disk already";
  }
  objects.mapped(reader, large);
  fetched = {};
  putter.join();
  EXPECT_EQ(objects.list(0, 1, nullptr).at(0).place, "memfd");
  EXPECT_EQ(objects.stats().bytes, 32U << 20);
}

TEST(Spilling, HandlesThatShareAContentAreSpilledTogether) {
  Objects objects(kOwner, capped(2 << 20, WhenFull::spill));
  const auto reader = objects.admit(trainer(0));
  const auto first = put(objects, step(1), 1 << 20);
  const auto second = objects.put_again(terms(step(2), 1 << 20), first.id);
  put(objects, step(3), 2 << 20);
  EXPECT_EQ(objects.stats().bytes, 2U << 20);
  EXPECT_EQ(objects.stats().spilled_bytes, 1U << 20);
  objects.close(step(1), kController);
  EXPECT_EQ(read_whole(*objects.fetch(reader, second.id, {}).content), pattern(1 << 20));
}

TEST(Spilling, AFullDiskIsABudgetErrorAndNothingIsLost) {
  const auto child = ::fork();
  if (child == 0) {
    // A limit on the size of files stands for the full disk.
    ::signal(SIGXFSZ, SIG_IGN);
    Objects objects(kOwner, capped(2 << 20, WhenFull::spill));
    const auto reader = objects.admit(trainer(0));
    const auto kept = put(objects, step(1), 2 << 20).id;
    const rlimit small{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &small);
    const auto what = what_of<BudgetError>([&] { put(objects, step(1), 2 << 20); });
    const bool same = read_whole(*objects.fetch(reader, kept, {}).content) == pattern(2 << 20);
    ::_exit(what.find("could not be spilled") == std::string::npos ? 1 : same ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace tenure::store
