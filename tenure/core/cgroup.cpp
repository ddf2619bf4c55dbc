#include <tenure/core/cgroup.h>

#include <algorithm>
#include <array>
#include <ranges>
#include <utility>

namespace tenure {
namespace {

// Version 1 says "no limit" with the largest multiple of the page size, which differs by machine.
constexpr int64_t kNoLimit = int64_t{1} << 62;

struct Mount {
  std::string root;
  std::string point;
};

// Calls `visit` with each line until it returns true.
template <class Visit>
void any_line(std::string_view text, Visit visit) {
  for (const auto line : std::views::split(text, '\n')) {
    if (visit(std::string_view(line.begin(), line.end()))) {
      return;
    }
  }
}

std::vector<std::string_view> words(std::string_view line, char separator) {
  std::vector<std::string_view> out;
  for (const auto word : std::views::split(line, separator)) {
    out.emplace_back(word.begin(), word.end());
  }
  return out;
}

// mountinfo writes a space, tab, newline or backslash in a path as three octal digits: "\040".
std::string unescaped(std::string_view path) {
  std::string out;
  for (size_t i = 0; i < path.size(); ++i) {
    if (path[i] == '\\' && i + 3 < path.size()) {
      out += static_cast<char>((path[i + 1] - '0') * 64 + (path[i + 2] - '0') * 8 +
                               (path[i + 3] - '0'));
      i += 3;
    } else {
      out += path[i];
    }
  }
  return out;
}

// "36 35 98:0 /root /point rw,noatime shared:1 - cgroup cgroup rw,memory": the optional fields
// before the dash vary in number.
std::optional<Mount> memory_mount(std::string_view mountinfo, CgroupVersion version) {
  std::optional<Mount> found;
  any_line(mountinfo, [&](std::string_view line) {
    const auto fields = words(line, ' ');
    const auto dash = std::ranges::find(fields, "-");
    if (fields.size() < 6 || fields.end() - dash < 4) {
      return false;
    }
    const bool matches =
        version == CgroupVersion::v2
            ? dash[1] == "cgroup2"
            : dash[1] == "cgroup" && std::ranges::count(words(dash[3], ','), "memory");
    if (matches) {
      found = Mount{unescaped(fields[3]), unescaped(fields[4])};
    }
    return matches;
  });
  return found;
}

struct Membership {
  CgroupVersion version;
  std::string_view path;
};

// A controller is attached to one hierarchy only, so a version 1 line that names it settles it.
std::optional<Membership> memory_membership(std::string_view cgroup) {
  std::optional<Membership> found;
  any_line(cgroup, [&](std::string_view line) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string_view::npos || second == std::string_view::npos) {
      return false;
    }
    const auto controllers = line.substr(first + 1, second - first - 1);
    const auto path = line.substr(second + 1);
    if (std::ranges::count(words(controllers, ','), "memory") > 0) {
      found = Membership{CgroupVersion::v1, path};
      return true;
    }
    if (line.starts_with("0::")) {
      found = Membership{CgroupVersion::v2, path};
    }
    return false;
  });
  return found;
}

// The part of `path` below `root`. A container that sees its own group as the root of the mount
// may still be told a path from outside: then the mount itself is its group.
std::string below(std::string_view path, std::string_view root) {
  if (root == "/") {
    root = "";
  }
  const bool inside = path.starts_with(root) &&
                      (path.size() == root.size() || path[root.size()] == '/') &&
                      path.find("/..") == std::string_view::npos;
  if (!inside) {
    return {};
  }
  auto rest = path.substr(root.size());
  while (rest.ends_with('/')) {
    rest.remove_suffix(1);
  }
  return std::string(rest);
}

std::optional<int64_t> value(const KernelFile& file) {
  std::array<char, 64> buffer{};
  return leading_number(file.read(buffer));
}

std::optional<int64_t> limit_in(const KernelFile& file) {
  const auto limit = value(file);
  return limit && *limit < kNoLimit ? limit : std::nullopt;
}

}  // namespace

std::optional<CgroupPlace> find_memory_cgroup(std::string_view cgroup, std::string_view mountinfo) {
  const auto membership = memory_membership(cgroup);
  if (!membership) {
    return std::nullopt;
  }
  auto mount = memory_mount(mountinfo, membership->version);
  if (!mount) {
    return std::nullopt;
  }
  auto directory = mount->point + below(membership->path, mount->root);
  return CgroupPlace{membership->version, std::move(mount->point), std::move(directory)};
}

MemoryCgroup::MemoryCgroup(const CgroupPlace& place) : version_(place.version) {
  const bool v2 = version_ == CgroupVersion::v2;
  const std::string usage = v2 ? "/memory.current" : "/memory.usage_in_bytes";
  const std::string limit = v2 ? "/memory.max" : "/memory.limit_in_bytes";
  for (auto directory = place.directory; directory.size() >= place.mount.size();
       directory.resize(directory.find_last_of('/'))) {
    Level level{KernelFile(directory + usage), KernelFile(directory + limit)};
    const bool own = levels_.empty() && level.usage.is_open();
    if (own) {
      statistics_ = KernelFile(directory + "/memory.stat");
    }
    if (own || limit_in(level.limit)) {
      levels_.push_back(std::move(level));
    }
  }
}

std::optional<MemoryCgroup> MemoryCgroup::of_this_process() {
  const auto place = find_memory_cgroup(read_kernel_file("/proc/self/cgroup"),
                                        read_kernel_file("/proc/self/mountinfo"));
  return place ? std::optional<MemoryCgroup>(*place) : std::nullopt;
}

std::optional<CgroupSample> MemoryCgroup::sample() const {
  const auto own = levels_.empty() ? std::nullopt : value(levels_.front().usage);
  if (!own) {
    return std::nullopt;
  }
  CgroupSample out{*own, std::nullopt, std::nullopt};
  for (const auto& level : levels_) {
    const auto limit = limit_in(level.limit);
    const auto usage = value(level.usage);
    if (limit && usage) {
      out.limit = std::min(out.limit.value_or(*limit), *limit);
      const int64_t left = std::max(*limit - *usage, int64_t{0});
      out.headroom = std::min(out.headroom.value_or(left), left);
    }
  }
  return out;
}

std::optional<int64_t> MemoryCgroup::inactive_file() const { return statistic("inactive_file"); }
std::optional<int64_t> MemoryCgroup::shared() const { return statistic("shmem"); }

std::optional<int64_t> MemoryCgroup::statistic(const std::string& name) const {
  std::array<char, 8192> buffer{};
  const auto key = (version_ == CgroupVersion::v2 ? "" : "total_") + name + " ";
  return number_after(key, statistics_.read(buffer));
}

}  // namespace tenure
