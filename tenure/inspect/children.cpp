#include <tenure/inspect/children.h>

#include <tenure/core/cgroup.h>
#include <tenure/core/kernel_file.h>

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tenure::inspect {
namespace {

// The beginning of a file in /proc, or nothing if its process is gone.
std::string proc_text(pid_t process, const char* name) {
  const auto path = "/proc/" + std::to_string(process) + "/" + name;
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "re"), &std::fclose);
  std::string out(512, '\0');
  out.resize(file ? std::fread(out.data(), 1, out.size(), file.get()) : 0);
  return out;
}

// The fourth field of stat; the second is a name in parentheses that may contain anything.
pid_t parent_of(pid_t process) {
  const auto stat = proc_text(process, "stat");
  const auto name_end = stat.rfind(')');
  if (name_end == std::string::npos || name_end + 4 > stat.size()) {
    return 0;
  }
  return static_cast<pid_t>(std::strtol(stat.c_str() + name_end + 4, nullptr, 10));
}

// The directories there that are named by numbers, which are processes or threads.
std::vector<pid_t> numbered(const std::string& directory) {
  std::vector<pid_t> out;
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(directory.c_str()), &::closedir);
  while (const auto* entry = opened ? ::readdir(opened.get()) : nullptr) {
    if (const auto number = static_cast<pid_t>(std::strtol(entry->d_name, nullptr, 10))) {
      out.push_back(number);
    }
  }
  return out;
}

using Families = std::unordered_map<pid_t, std::vector<pid_t>>;

Families all_families() {
  Families out;
  for (const auto process : numbered("/proc")) {
    out[parent_of(process)].push_back(process);
  }
  return out;
}

// Kernels that were built to say it name the children of each thread, which takes no look at the
// processes of others.
bool kernel_names_children() {
  static const bool names = ::access("/proc/thread-self/children", R_OK) == 0;
  return names;
}

std::vector<pid_t> numbers_in(const std::string& text) {
  std::vector<pid_t> out;
  char* next = nullptr;
  for (const auto* at = text.c_str(); *at != '\0'; at = next) {
    const auto number = std::strtol(at, &next, 10);
    if (next == at) {
      break;
    }
    out.push_back(static_cast<pid_t>(number));
    next += *next == '\n' ? 1 : 0;
  }
  return out;
}

std::vector<pid_t> named_children(pid_t process) {
  std::vector<pid_t> out;
  const auto threads = "/proc/" + std::to_string(process) + "/task/";
  for (const auto thread : numbered(threads)) {
    const auto some = numbers_in(read_kernel_file(threads + std::to_string(thread) + "/children"));
    out.insert(out.end(), some.begin(), some.end());
  }
  return out;
}

int64_t private_bytes_of(pid_t process) {
  const auto statm = proc_text(process, "statm");  // pages: all, resident, shared …
  char* next = nullptr;
  std::strtoll(statm.c_str(), &next, 10);
  const auto resident = std::strtoll(next, &next, 10);
  const auto shared = std::strtoll(next, &next, 10);
  return (resident - shared) * ::sysconf(_SC_PAGESIZE);
}

}  // namespace

std::vector<pid_t> children_of(pid_t process) {
  auto families = kernel_names_children() ? Families() : all_families();
  std::vector<pid_t> out;
  std::vector<pid_t> left{process};
  while (!left.empty()) {
    const auto parent = left.back();
    left.pop_back();
    const auto found = kernel_names_children() ? named_children(parent) : families[parent];
    out.insert(out.end(), found.begin(), found.end());
    left.insert(left.end(), found.begin(), found.end());
  }
  return out;
}

bool has_group_alone(std::span<const pid_t> children) {
  const auto place = find_memory_cgroup(read_kernel_file("/proc/self/cgroup"),
                                        read_kernel_file("/proc/self/mountinfo"));
  if (!place) {
    return false;
  }
  std::unordered_set<pid_t> family(children.begin(), children.end());
  for (auto process = ::getpid(); process > 0; process = parent_of(process)) {
    family.insert(process);
  }
  const auto members = numbers_in(read_kernel_file(place->directory + "/cgroup.procs"));
  return !members.empty() && std::ranges::all_of(members, [&](const auto member) {
    return family.contains(member);  // 0 is one outside this container
  });
}

int64_t private_bytes(std::span<const pid_t> processes) {
  int64_t sum = 0;
  for (const auto process : processes) {
    sum += private_bytes_of(process);
  }
  return sum;
}

}  // namespace tenure::inspect
