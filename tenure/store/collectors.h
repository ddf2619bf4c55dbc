// Who may fetch an object, said when it is put. Torch-free values.
#pragma once

#include <tenure/store/identity.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tenure::store {

// One expected fetch, by a member that fits.
struct Collector {
  std::string role;             // empty: of any role
  std::optional<int32_t> rank;  // none: of any rank

  bool operator==(const Collector&) const = default;
};

// "trainer 3", "any trainer", "rank 3"
std::string collector_text(const Collector& collector);

struct Collectors {
  enum class Kind : uint8_t {
    anyone,  // of the job, as often as they like: the object goes with its scope
    listed,  // the object goes when each of `listed` has fetched it
    counted  // the object goes after `count` fetches, by anyone of the job
  };
  Kind kind = Kind::anyone;
  std::vector<Collector> listed;  // empty: nobody
  uint32_t count = 0;             // 0: nobody

  bool operator==(const Collectors&) const = default;
  [[nodiscard]] bool nobody() const {
    return (kind == Kind::listed && listed.empty()) || (kind == Kind::counted && count == 0);
  }
};

inline constexpr size_t kMostCollectors = 4096;

}  // namespace tenure::store
