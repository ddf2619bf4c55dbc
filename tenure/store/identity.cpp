#include <tenure/store/identity.h>

#include <tenure/core/error.h>
#include <tenure/core/kernel_file.h>
#include <tenure/core/text.h>
#include <tenure/store/characters.h>

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <string_view>

namespace tenure::store {
namespace {

constexpr const char* kBootFile = "/proc/sys/kernel/random/boot_id";
constexpr const char* kNetworkFile = "/proc/self/ns/net";

int hex_value(char digit) {
  if (digit >= '0' && digit <= '9') {
    return digit - '0';
  }
  return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

// "f81d4fae-7dec-11d0-a765-00a0c91e6bf6\n"
std::array<std::byte, 16> boot_of(std::string_view id) {
  std::array<std::byte, 16> boot{};
  size_t digits = 0;
  for (const char c : id) {
    const int value = hex_value(c);
    if (value < 0 || digits == 2 * boot.size()) {
      continue;
    }
    boot[digits / 2] = (boot[digits / 2] << 4U) | static_cast<std::byte>(value);
    ++digits;
  }
  if (digits != 2 * boot.size()) {
    throw Error(text("the store cannot tell which boot this is: ", kBootFile,
                     " cannot be read. It needs /proc, and a free descriptor (ulimit -n)"));
  }
  return boot;
}

uint64_t network_of_this_process() {
  struct stat status{};
  if (stat(kNetworkFile, &status) != 0) {
    throw Error(text("the store cannot tell which network namespace this is: ", kNetworkFile, ": ",
                     std::strerror(errno), ". It needs /proc to be mounted"));
  }
  return status.st_ino;
}

void check_name(std::string_view what, std::string_view name, size_t most) {
  if (name.size() > most) {
    throw InputError(text("the ", what, " '", front_of(as_prose(name, 40), 40), "...' has ",
                          name.size(), " bytes: at most ", most, " are allowed"));
  }
  if (!is_line(name)) {
    throw InputError(text("the ", what, " '", as_prose(name, most),
                          "' is not UTF-8, or has control characters in it"));
  }
}

void check_not_empty(std::string_view what, std::string_view name) {
  if (name.empty()) {
    throw InputError(text("the ", what, " is empty: give it a name"));
  }
}

}  // namespace

std::string member_text(const Member& member) { return text(member.role, ' ', member.rank); }

std::string scope_text(const ScopeName& scope) {
  return scope.id.empty() ? scope.kind : text(scope.kind, ' ', scope.id);
}

Host this_host() {
  return {.boot = boot_of(read_kernel_file(kBootFile)),
          .network = network_of_this_process(),
          .user = geteuid()};
}

uint64_t new_incarnation() {
  uint64_t number = 0;
  while (number == 0) {
    if (getrandom(&number, sizeof number, 0) != sizeof number && errno != EINTR) {
      throw Error(text("the system gives no random numbers: ", std::strerror(errno)));
    }
  }
  return number;
}

int64_t now_ms() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(since).count();
}

std::string time_text(int64_t ms) {
  const auto seconds = static_cast<time_t>(ms >= 0 ? ms / 1000 : (ms - 999) / 1000);
  tm parts{};
  if (localtime_r(&seconds, &parts) == nullptr) {
    return text(ms, " ms since 1970");
  }
  std::array<char, 64> out{};
  const size_t length = std::strftime(out.data(), out.size(), "%Y-%m-%d %H:%M:%S", &parts);
  return {out.data(), length};
}

void check_member(const Member& member) {
  check_not_empty("role", member.role);
  check_name("role", member.role, kMostRoleBytes);
  if (member.role.find(':') != std::string::npos) {
    throw InputError(text("the role '", member.role, "' has a ':' in it: leave it out"));
  }
  if (member.rank < 0) {
    throw InputError(
        text("the rank of ", member.role, " is ", member.rank, ": ranks are counted from 0"));
  }
  if (member.incarnation == 0) {
    throw InputError(text(member_text(member), " has incarnation 0: new_incarnation() gives one"));
  }
}

void check_job(const std::string& job) {
  check_not_empty("job", job);
  check_name("job", job, kMostJobBytes);
}

void check_scope(const ScopeName& scope) {
  check_not_empty("kind of a scope", scope.kind);
  check_name("kind of a scope", scope.kind, kMostScopeKindBytes);
  check_name("id of a scope", scope.id, kMostScopeIdBytes);
}

void check_origin(const Origin& origin) {
  check_job(origin.job);
  check_member(origin.owner);
  check_name("path of a socket", origin.path, kMostPathBytes);
  if (!origin.path.empty() && origin.path.front() != '/') {
    throw InputError(text("the path of a socket '", origin.path, "' does not begin with '/'"));
  }
  check_name("address", origin.address, kMostAddressBytes);
  if (origin.address.empty() != (origin.port == 0)) {
    throw InputError(text("the address '", origin.address, "' goes with port ", origin.port,
                          ": there are both or neither"));
  }
}

}  // namespace tenure::store
