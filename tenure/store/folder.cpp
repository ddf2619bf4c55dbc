// Where the processes of a job find each other on a host.
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/descriptor.h>
#include <tenure/store/server.h>
#include <tenure/store/socket.h>

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

namespace tenure::store {
namespace {

// A young socket may belong to a process that is about to listen on it.
constexpr std::chrono::seconds kYoung{60};
constexpr size_t kMostBase = 40;  // of the 107 bytes of a Unix socket's path

std::string base_folder() {
  const char* chosen = std::getenv("TMPDIR");
  std::string base = chosen != nullptr && chosen[0] == '/' ? chosen : "/tmp";
  while (base.size() > 1 && base.back() == '/') {
    base.pop_back();
  }
  return base.size() <= kMostBase ? base : "/tmp";
}

// Made for this user alone, or found so.
void make_own(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    throw Error(text("the folder ", folder, " for the store's sockets cannot be made: ",
                     errno_text(errno), "; set TMPDIR to a folder that can be written to"));
  }
  struct stat state{};
  if (::lstat(folder.c_str(), &state) != 0 || !S_ISDIR(state.st_mode) ||
      state.st_uid != ::geteuid() || (state.st_mode & 077U) != 0) {
    throw Error(text("the folder ", folder, " for the store's sockets is not this user's alone ",
                     "(a folder of mode 0700 is wanted); remove it, or set TMPDIR to another "
                     "folder"));
  }
}

// 64 bits of FNV-1a: two jobs of one user that share a folder still have sockets of their own.
uint64_t short_digest(std::string_view name) {
  uint64_t digest = 0xcbf29ce484222325;
  for (const char character : name) {
    digest = (digest ^ static_cast<uint8_t>(character)) * 0x100000001b3;
  }
  return digest;
}

bool nobody_listens(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return false;
  }
  path.copy(address.sun_path, path.size());
  const Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): the sockets API
  const auto* const general = reinterpret_cast<const sockaddr*>(&address);
  return socket.is_open() && ::connect(socket.get(), general, sizeof(address)) != 0 &&
         errno == ECONNREFUSED;
}

}  // namespace

std::string job_folder(const std::string& job) {
  check_job(job);
  const std::string own = text(base_folder(), "/tenure-", ::geteuid());
  make_own(own);
  char digest[17];
  std::snprintf(digest, sizeof(digest), "%016llx",
                static_cast<unsigned long long>(short_digest(job)));
  const std::string folder = text(own, "/", digest);
  make_own(folder);
  return folder;
}

void name_folder(const std::string& folder, const std::string& job) {
  const std::string file = folder + "/job";
  if (std::filesystem::exists(file)) {
    return;
  }
  const std::string made = text(file, '.', ::getpid());
  std::ofstream(made) << job;
  std::error_code ignored;
  std::filesystem::rename(made, file, ignored);
}

void remove_dead_sockets(const std::string& folder) {
  using Clock = std::filesystem::file_time_type::clock;
  std::error_code ignored;
  for (const auto& path : sockets_in(folder)) {
    const auto written = std::filesystem::last_write_time(path, ignored);
    if (!ignored && Clock::now() - written > kYoung && nobody_listens(path)) {
      std::filesystem::remove(path, ignored);
    }
  }
}

std::vector<std::string> sockets_in(const std::string& folder) {
  std::vector<std::string> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (entry.path().extension() == ".sock" && entry.is_socket(ignored)) {
      found.push_back(entry.path().string());
    }
  }
  std::ranges::sort(found);
  return found;
}

}  // namespace tenure::store
