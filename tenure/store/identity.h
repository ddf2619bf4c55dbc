// Who takes part in a store and where they are. Plain data; torch-free. Names are UTF-8 without
// control characters, and their limits are in bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace tenure::store {

inline constexpr size_t kMostJobBytes = 128;
inline constexpr size_t kMostRoleBytes = 64;
inline constexpr size_t kMostScopeKindBytes = 64;
inline constexpr size_t kMostScopeIdBytes = 128;
inline constexpr size_t kMostPathBytes = 107;  // sun_path, without its zero
inline constexpr size_t kMostAddressBytes = 253;

// A process of a job. One that is started again has another incarnation, so what it is asked for
// is never taken for what its predecessor had.
struct Member {
  std::string role;          // "trainer"; 1 to 64 bytes, no ':'
  int32_t rank = 0;          // within its role, never negative
  uint64_t incarnation = 0;  // random, never 0

  bool operator==(const Member&) const = default;
};

// "trainer 3"
std::string member_text(const Member& member);

// Where a Unix socket can be reached: the same boot, network namespace and user. A path alone does
// not say so: a path crosses network namespaces, and containers share a boot.
struct Host {
  std::array<std::byte, 16> boot{};
  uint64_t network = 0;  // inode of the network namespace
  uint32_t user = 0;

  bool operator==(const Host&) const = default;
};

// Of the calling process.
Host this_host();

// How to reach an owner. Shared by all its handles.
struct Origin {
  std::string job;  // 1 to 128 bytes
  Member owner;
  Host host;
  std::string path;     // of its Unix socket: absolute, or empty if it has none
  std::string address;  // of its TCP socket: a name or number, empty if it has none
  uint16_t port = 0;    // 0 if and only if there is no address

  bool operator==(const Origin&) const = default;
};

// The scope that owns an object. The same names mean the same scope in every process of a job.
struct ScopeName {
  std::string kind;  // "step", "eval", or a name of the user's; 1 to 64 bytes
  std::string id;    // "168"; at most 128 bytes, may be empty

  bool operator==(const ScopeName&) const = default;
  auto operator<=>(const ScopeName&) const = default;
};

// "step 168"
std::string scope_text(const ScopeName& scope);

// A place in an owner's table. A place is used again with another generation, and an owner never
// gives out the same pair twice.
struct ObjectId {
  uint32_t slot = 0;
  uint32_t generation = 0;

  bool operator==(const ObjectId&) const = default;
};

// Random, never 0.
uint64_t new_incarnation();

// Milliseconds since 1970, for what people read.
int64_t now_ms();
// "2026-11-15 14:03:22", local time
std::string time_text(int64_t ms);

// Throw InputError, naming what is wrong, for one that cannot be.
void check_member(const Member& member);
void check_job(const std::string& job);
void check_scope(const ScopeName& scope);
void check_origin(const Origin& origin);

}  // namespace tenure::store
