#include <tenure/core/sample.h>

#include <tenure/core/error.h>
#include <tenure/core/kernel_file.h>

#include <gtest/gtest.h>

#include <dirent.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <set>
#include <thread>
#include <vector>

namespace tenure {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kBlock = 64 * kMiB;
constexpr int64_t kSlack = kMiB;  // what the test and the allocator may touch meanwhile

// Memory that the process touched, given back to the system at the end.
class Touched {
 public:
  explicit Touched(int64_t bytes, int sharing = MAP_PRIVATE)
      : bytes_(static_cast<size_t>(bytes)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0)) {
    if (data_ == MAP_FAILED) {
      throw std::bad_alloc();
    }
    touch();
  }
  void touch() const { std::memset(data_, 1, bytes_); }
  ~Touched() { munmap(data_, bytes_); }
  Touched(const Touched&) = delete;
  Touched& operator=(const Touched&) = delete;

 private:
  size_t bytes_;
  void* data_;
};

int64_t entries(const char* directory) {
  auto* all = opendir(directory);
  int64_t count = 0;
  while (const auto* entry = readdir(all)) {
    count += entry->d_name[0] == '.' ? 0 : 1;
  }
  closedir(all);
  return count;
}

int64_t open_files() { return entries("/proc/self/fd"); }
int64_t threads() { return entries("/proc/self/task"); }

// The kernel lists a joined thread a moment longer.
int64_t threads_when(int64_t expected) {
  const auto until = std::chrono::steady_clock::now() + 10s;
  while (threads() != expected && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  return threads();
}

// The first walk that began after the call.
MappedSample next_walk(const Sampler& sampler) {
  const auto begin = std::chrono::steady_clock::now();
  auto waited = 0ns;
  while (waited < 30s) {
    waited = std::chrono::steady_clock::now() - begin;
    const auto mapped = sampler.sample().process.mapped;
    if (mapped && mapped->age < waited) {
      return *mapped;
    }
    std::this_thread::yield();
  }
  ADD_FAILURE() << "no walk in 30 s";
  return {};
}

// CPU time of this thread.
std::chrono::nanoseconds worked() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

std::chrono::nanoseconds cost_of_a_walk() {
  const KernelFile rollup("/proc/self/smaps_rollup");
  std::array<char, 2048> buffer{};
  std::chrono::nanoseconds least = 1h;
  for (int i = 0; i < 5; ++i) {
    const auto before = worked();
    EXPECT_FALSE(rollup.read(buffer).empty());
    least = std::min(least, worked() - before);
  }
  return least;
}

// Programs that start and end meanwhile share our files with us.
int64_t pss_without_files(const MappedSample& mapped) {
  return mapped.pss - mapped.pss_file.value();
}

// Runs `body` in a forked child and returns the child's exit code; 99 if it hung.
int exit_code_of_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

TEST(ProcessSample, FollowsTouchedMemory) {
  const Sampler sampler;
  const auto before = sampler.sample().process;
  const Touched block(kBlock);
  const auto after = sampler.sample().process;
  EXPECT_NEAR(after.rss - before.rss, kBlock, kSlack);
  EXPECT_GE(after.virtual_size - before.virtual_size, kBlock);
  EXPECT_GE(after.peak_rss, after.rss - kSlack);
}

TEST(ProcessSample, ThePeakStaysWhenMemoryGoes) {
  const Sampler sampler;
  const auto before = sampler.sample().process;
  {
    const Touched block(kBlock);
  }
  const auto after = sampler.sample().process;
  EXPECT_NEAR(after.rss, before.rss, kSlack);
  EXPECT_GE(after.peak_rss.value(), before.rss + kBlock - kSlack);
}

TEST(ProcessSample, SharedMemoryIsCountedAsShared) {
  const Sampler sampler;
  const auto before = sampler.sample().process.shared.value();
  const Touched block(kBlock, MAP_SHARED);
  EXPECT_NEAR(sampler.sample().process.shared.value() - before, kBlock, kSlack);
}

TEST(ProcessSample, KnowsTheHost) {
  const auto process = Sampler().sample().process;
  EXPECT_EQ(process.host_total.value(), sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE));
  EXPECT_GT(process.host_available.value(), 0);
  EXPECT_LE(process.host_available.value(), process.host_total.value());
}

TEST(ProcessSample, KnowsItsOwnLimits) {
  const Sampler sampler;
  for (const auto& [resource, seen] : {std::pair(RLIMIT_AS, &ProcessSample::virtual_limit),
                                       std::pair(RLIMIT_DATA, &ProcessSample::data_limit)}) {
    rlimit before{};
    ASSERT_EQ(getrlimit(resource, &before), 0);
    rlimit limited = before;
    limited.rlim_cur = rlim_t{1} << 44;
    ASSERT_EQ(setrlimit(resource, &limited), 0);
    EXPECT_EQ(sampler.sample().process.*seen, int64_t{1} << 44);
    ASSERT_EQ(setrlimit(resource, &before), 0);
    if (before.rlim_cur == RLIM_INFINITY) {
      EXPECT_EQ(sampler.sample().process.*seen, std::nullopt);
    }
  }
}

TEST(ProcessSample, DataIsPrivateAndWritable) {
  const Sampler sampler;
  const auto before = sampler.sample().process.data.value();
  const Touched block(kBlock);
  EXPECT_NEAR(sampler.sample().process.data.value() - before, kBlock, kSlack);
}

TEST(DeviceSample, WithoutAnAcceleratorThereIsNone) {
  const auto sample = Sampler().sample();
  EXPECT_TRUE(sample.devices.empty());
  EXPECT_FALSE(sample.pinned.has_value());
}

TEST(Refresh, NothingRunsUnlessAsked) {
  const auto before = threads();
  const Sampler sampler;
  EXPECT_FALSE(sampler.sample().process.mapped.has_value());
  EXPECT_EQ(threads_when(before), before);
}

TEST(Refresh, PssAndExactRssFollowTouchedMemory) {
  Sampler sampler;
  const auto refresh = sampler.refresh(5ms);
  const auto before = next_walk(sampler);
  const Touched block(kBlock);
  const auto after = next_walk(sampler);
  EXPECT_NEAR(pss_without_files(after) - pss_without_files(before), kBlock, kSlack);
  EXPECT_NEAR(after.rss - before.rss, kBlock, kSlack);
  EXPECT_LE(after.pss, after.rss);
}

TEST(Refresh, MemorySharedWithAParentCountsHalfInPss) {
  Sampler sampler;
  const Touched block(kBlock, MAP_SHARED);
  EXPECT_EQ(exit_code_of_child([&] {
              const auto refresh = sampler.refresh(5ms);
              const auto before = next_walk(sampler);
              block.touch();
              const auto after = next_walk(sampler);
              const auto risen = pss_without_files(after) - pss_without_files(before);
              return std::abs(risen - kBlock / 2) < kSlack ? 0 : 1;
            }),
            0);
}

TEST(Refresh, ThreadsStopWithTheLastOne) {
  const auto before = threads();
  Sampler sampler;
  {
    auto first = sampler.refresh(1h);
    {
      const auto second = sampler.refresh(10ms);
      EXPECT_EQ(threads(), before + 1);
    }
    EXPECT_EQ(threads(), before + 1);
    const auto moved = std::move(first);
    EXPECT_EQ(threads(), before + 1);
  }
  EXPECT_EQ(threads_when(before), before);
}

TEST(Refresh, AShorterPeriodTakesEffectAtOnce) {
  Sampler sampler;
  const auto slow = sampler.refresh(1h);
  const auto fast = sampler.refresh(5ms);
  EXPECT_LT(next_walk(sampler).age, 1min);
  EXPECT_LT(next_walk(sampler).age, 1min);
}

// Whatever the period is, for walks cost what the process has in memory.
TEST(Refresh, WalksHaveAShareOfTheTime) {
  const Touched block(kBlock);
  const auto cost = cost_of_a_walk();
  Sampler sampler;
  const auto refresh = sampler.refresh(1ms);
  std::set<int64_t> walks;  // when they began, in milliseconds
  const auto begin = std::chrono::steady_clock::now();
  auto passed = 0ns;
  while ((passed = std::chrono::steady_clock::now() - begin) < 1s) {
    if (const auto mapped = sampler.sample().process.mapped) {
      const auto began = std::chrono::steady_clock::now() - begin - mapped->age;
      walks.insert(std::chrono::floor<std::chrono::milliseconds>(began).count());
    }
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_GE(walks.size(), 1U);
  // A walk may be counted twice, as its beginning is read a little late at times.
  EXPECT_LE(cost * walks.size(), 6 * cost + passed / 100) << walks.size() << " walks";
}

TEST(Refresh, MayEndWhileAWalkIsUnderWay) {
  const auto before = threads();
  for (int i = 0; i < 100; ++i) {
    Sampler sampler;
    const auto refresh = sampler.refresh(1ms);
  }
  EXPECT_EQ(threads_when(before), before);
}

TEST(Refresh, RefusesAPeriodThatIsNone) {
  Sampler sampler;
  EXPECT_THROW(static_cast<void>(sampler.refresh(0ms)), InputError);
  EXPECT_THROW(static_cast<void>(sampler.refresh(-5ms)), InputError);
  EXPECT_THROW(static_cast<void>(sampler.refresh(25h)), InputError);
  const std::chrono::duration<double> nonsense(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THROW(static_cast<void>(sampler.refresh(nonsense)), InputError);
}

TEST(Sampler, AThousandLeaveNoDescriptorOpen) {
  const auto before = open_files();
  for (int i = 0; i < 1000; ++i) {
    Sampler sampler;
    const auto refresh = sampler.refresh();
    static_cast<void>(sampler.sample());
  }
  EXPECT_EQ(open_files(), before);
}

TEST(Sampler, AtRestHasNoDescriptorOpenAndGoesOn) {
  Sampler sampler;
  sampler.rest();
  const auto before = open_files();
  static_cast<void>(sampler.sample());
  EXPECT_GT(open_files(), before);
  {
    const auto refresh = sampler.refresh(1ms);
    sampler.rest();  // not while someone wants figures
    EXPECT_GT(next_walk(sampler).pss, 0);
  }
  sampler.rest();
  EXPECT_EQ(open_files(), before);
  EXPECT_GT(sampler.sample().process.rss, 0);
}

TEST(Sampler, MayRestWhileOthersSample) {
  Sampler sampler;
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> users;
    users.reserve(4);
    for (int i = 0; i < 4; ++i) {
      users.emplace_back([&] {
        for (int n = 0; n < 500; ++n) {
          wrong += sampler.sample().process.rss <= 0;
          if (n % 250 == 0) {
            const auto refresh = sampler.refresh(1ms);
            wrong += next_walk(sampler).pss <= 0;
          }
        }
      });
    }
    for (int n = 0; n < 200; ++n) {
      sampler.rest();
      std::this_thread::yield();
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Sampler, MayBeUsedFromManyThreads) {
  Sampler sampler;
  std::vector<std::jthread> users;
  users.reserve(8);
  std::atomic<int> wrong{0};
  for (int i = 0; i < 8; ++i) {
    users.emplace_back([&] {
      for (int n = 0; n < 200; ++n) {
        const auto refresh = sampler.refresh(std::chrono::milliseconds(1 + n % 3));
        const auto process = sampler.sample().process;
        wrong += process.rss <= 0 || (process.mapped && process.mapped->pss <= 0);
      }
    });
  }
  users.clear();
  EXPECT_EQ(wrong, 0);
}

TEST(ForkedChild, SamplesItselfAndNotItsParent) {
  const Sampler sampler;
  static_cast<void>(sampler.sample());
  EXPECT_EQ(exit_code_of_child([&] {
              const auto before = sampler.sample().process.rss;
              const Touched block(kBlock);
              const auto risen = sampler.sample().process.rss - before;
              // The kernel counts pages per CPU and adds them up now and then: on a machine of many
              // CPUs a young process is some MiB off.
              return std::abs(risen - kBlock) < kBlock / 8 ? 0 : 1;
            }),
            0);
}

TEST(ForkedChild, KeepsNoDescriptorOfItsParent) {
  Sampler sampler;
  const auto refresh = sampler.refresh(1ms);
  static_cast<void>(sampler.sample());
  const auto before = open_files();
  EXPECT_EQ(exit_code_of_child([&] {
              static_cast<void>(sampler.sample());
              return open_files() == before ? 0 : 1;
            }),
            0);
}

TEST(ForkedChild, HasNoThreadUntilItAsksForOne) {
  Sampler sampler;
  auto refresh = sampler.refresh(1ms);
  EXPECT_EQ(exit_code_of_child([&] {
              if (sampler.sample().process.mapped || threads() != 1) {
                return 1;
              }
              {
                const auto inherited = std::move(refresh);
              }  // the parent's: nothing to stop
              const auto own = sampler.refresh(1ms);
              return next_walk(sampler).pss > 0 && threads() == 2 ? 0 : 2;
            }),
            0);
  EXPECT_GT(next_walk(sampler).pss, 0);
}

TEST(ForkedChild, MayDestroyWhatItInherited) {
  auto sampler = std::make_unique<Sampler>();
  auto refresh = sampler->refresh(1ms);
  EXPECT_EQ(exit_code_of_child([&] {
              refresh = {};
              sampler.reset();
              return 0;
            }),
            0);
  refresh = {};
}

TEST(SharedSampler, EndsCleanlyAtExitWithItsThreadRunning) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        static auto refresh = new Sampler::Refresh(Sampler::shared().refresh(1ms));
        static_cast<void>(next_walk(Sampler::shared()));
        std::exit(refresh == nullptr ? 1 : 0);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tenure
