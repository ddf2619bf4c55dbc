#include <tenure/inspect/origin.h>

#include <tenure/core/fork.h>

#include <deque>
#include <mutex>
#include <unordered_map>

namespace tenure::inspect {
namespace {

struct Hash {
  size_t operator()(const Origin& origin) const {
    uint64_t hash = 0;
    const auto mix = [&](uint64_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15ULL; };
    mix(static_cast<uint64_t>(origin.op) << 32 | static_cast<uint64_t>(origin.site));
    mix(static_cast<uint64_t>(origin.forward_site) << 32 | origin.module);
    mix(static_cast<uint64_t>(origin.stack) << 32 | static_cast<uint64_t>(origin.phase) << 16 |
        origin.device);
    return hash ^ (hash >> 29);
  }
};

struct Origins {
  Origins() { protect_across_fork(mutex); }
  std::mutex mutex;
  std::unordered_map<Origin, OriginId, Hash> ids;
  std::deque<Origin> all{Origin()};  // 0 is unknown
};

Origins& origin_table() {
  static auto* instance = new Origins;
  return *instance;
}

}  // namespace

OriginId intern(const Origin& origin) {
  auto& known = origin_table();
  std::lock_guard lock(known.mutex);
  const auto [found, added] =
      known.ids.try_emplace(origin, static_cast<OriginId>(known.all.size()));
  if (added) {
    known.all.push_back(origin);
  }
  return found->second;
}

Origin origin_of(OriginId id) {
  auto& known = origin_table();
  std::lock_guard lock(known.mutex);
  const auto index = static_cast<size_t>(id);
  return index < known.all.size() ? known.all[index] : Origin();
}

uint32_t origins() {
  auto& known = origin_table();
  std::lock_guard lock(known.mutex);
  return static_cast<uint32_t>(known.all.size());
}

}  // namespace tenure::inspect
