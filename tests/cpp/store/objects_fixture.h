// What the tests of the owner's side share.
#pragma once

#include <tenure/core/kernel_file.h>
#include <tenure/store/objects.h>

#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace tenure::store {

inline const Member kOwner{"rollout", 0, 11};
inline const Member kController{"controller", 0, 12};

inline Member trainer(int32_t rank, uint64_t incarnation = 100) {
  return {"trainer", rank, incarnation};
}

inline Limits capped(uint64_t cap, WhenFull when_full = WhenFull::refuse) {
  Limits limits;
  limits.cap = cap;
  limits.when_full = when_full;
  return limits;
}

inline ScopeName step(int id) { return {"step", std::to_string(id)}; }

inline Layout bytes_layout(uint64_t bytes) { return {Dtype::uint8, {static_cast<int64_t>(bytes)}}; }

// Bytes that no other seed gives.
inline std::vector<std::byte> pattern(uint64_t bytes, uint64_t seed = 1) {
  std::vector<std::byte> out(bytes);
  uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 1;
  for (uint64_t i = 0; i < bytes; i += sizeof state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(out.data() + i, &state, std::min<uint64_t>(sizeof state, bytes - i));
  }
  return out;
}

inline std::vector<std::byte> read_whole(const Content& content) {
  std::vector<std::byte> out(content.bytes());
  content.read(0, out);
  return out;
}

inline Collectors listed(std::vector<Collector> collectors) {
  Collectors out;
  out.kind = Collectors::Kind::listed;
  out.listed = std::move(collectors);
  return out;
}
inline Collectors counted(uint32_t count) {
  Collectors out;
  out.kind = Collectors::Kind::counted;
  out.count = count;
  return out;
}
inline Collectors anyone() { return {}; }

inline Terms terms(const ScopeName& scope, uint64_t bytes, Collectors collectors = {},
                   std::string call = "", std::string site = "train.py:41") {
  return {.scope = scope,
          .call = std::move(call),
          .collectors = std::move(collectors),
          .layout = bytes_layout(bytes),
          .site = std::move(site)};
}

inline Placed put(Objects& objects, const ScopeName& scope, uint64_t bytes,
                  Collectors collectors = {}, const std::string& call = "", uint64_t seed = 1) {
  return objects.put(terms(scope, bytes, std::move(collectors), call), pattern(bytes, seed));
}

// What must be there.
template <class Value>
Value must(std::optional<Value> value) {
  if (!value) {
    throw std::logic_error("there is none");
  }
  return std::move(*value);
}

// What `call` throws, in words; empty if it does not.
template <class Failure, class Call>
std::string what_of(const Call& call) {
  try {
    call();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return {};
}

// A sanitizer has memory of its own beside ours: the kernel's figures say nothing of us then.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Bytes of this process by the kernel's word: "RssShmem:", "RssAnon:", "VmRSS:".
inline int64_t resident(const char* kind) {
  return bytes_after(kind, read_kernel_file("/proc/self/status")).value_or(-1);
}
// What the kernel holds for the memfds that this process has open. One that nobody has open or
// mapped is gone, and the machine's own figure moves with every other process.
inline int64_t memfd_bytes() {
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry.path(), gone);
    struct stat what{};
    if (!gone && target.string().starts_with("/memfd:tenure") &&
        ::stat(entry.path().c_str(), &what) == 0) {
      bytes += what.st_blocks * 512;
    }
  }
  return bytes;
}

}  // namespace tenure::store
