// The memory control group of this process: what is charged to it, and the limit beyond which the
// kernel kills. Version 1 and version 2, also on machines that mount both.
//
// Threading: all methods from any thread.
#pragma once

#include <tenure/core/kernel_file.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tenure {

struct CgroupSample {
  // Bytes charged to the nearest group that accounts for the process: all its processes, and the
  // files they read as far as they are cached. The kernel drops cached files before it kills.
  int64_t usage = 0;
  // The tightest limit from the group upwards. No limit anywhere: absent.
  std::optional<int64_t> limit;
  // What is left under the limit that is met first: the minimum of limit - usage over the levels,
  // for a parent's limit is shared with the group's neighbours. No limit anywhere: absent.
  std::optional<int64_t> headroom;
};

enum class CgroupVersion : uint8_t { v1, v2 };

// Where in the file system the memory controller keeps the process's group. `mount` is a leading
// part of `directory`; the levels between them are the group's parents as far as they are visible.
struct CgroupPlace {
  CgroupVersion version{};
  std::string mount;
  std::string directory;
};

// Reads the texts of /proc/self/cgroup and /proc/self/mountinfo. No memory controller: nullopt.
std::optional<CgroupPlace> find_memory_cgroup(std::string_view cgroup, std::string_view mountinfo);

class MemoryCgroup {
 public:
  // Keeps open the group's own files and those of each parent that has a limit now. A limit set
  // later on a parent that had none is not seen.
  explicit MemoryCgroup(const CgroupPlace& place);

  // The group that the calling process is in now.
  static std::optional<MemoryCgroup> of_this_process();

  // Nothing is accounted here, as in the root group of version 2: nullopt.
  [[nodiscard]] std::optional<CgroupSample> sample() const;

  // Cached file pages that the kernel would drop first.
  [[nodiscard]] std::optional<int64_t> inactive_file() const;
  // Shared mappings and files that lie in memory (tmpfs, /dev/shm), which the kernel cannot drop.
  [[nodiscard]] std::optional<int64_t> shared() const;

 private:
  struct Level {
    KernelFile usage;
    KernelFile limit;
  };

  // Up to 0.1 ms on a large machine, whichever figure.
  [[nodiscard]] std::optional<int64_t> statistic(const std::string& name) const;

  CgroupVersion version_;
  std::vector<Level> levels_;  // upwards from the nearest group that accounts for the process
  KernelFile statistics_;
};

}  // namespace tenure
