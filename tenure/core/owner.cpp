#include <tenure/core/owner.h>

#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/names.h>
#include <tenure/core/text.h>

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <unordered_map>

namespace tenure {
namespace {

constexpr std::array<std::string_view, kOwnerKinds> kKindNames{
    "parameter",      "gradient",      "optimizer",     "activation", "host_copy",
    "receive_buffer", "communication", "stored_object", "workspace",  "user",
};

constexpr uint32_t kIndexBits = 24;
constexpr uint32_t kIndexMask = (1U << kIndexBits) - 1;

struct Entry {
  NameId name;
  NameId site;
};

struct OwnerTable {
  std::mutex mutex;
  std::deque<Entry> entries;
  // name and site, then kind: three small integers make one exact key.
  std::array<std::unordered_map<uint64_t, uint32_t>, kOwnerKinds> ids;

  OwnerTable() { protect_across_fork(mutex); }
};

OwnerTable& owner_table() {
  static auto* instance = new OwnerTable;
  return *instance;
}

}  // namespace

std::string_view kind_name(OwnerKind kind) { return kKindNames.at(static_cast<size_t>(kind)); }

OwnerKind kind_named(std::string_view name) {
  for (size_t i = 0; i < kKindNames.size(); ++i) {
    if (kKindNames[i] == name) {
      return static_cast<OwnerKind>(i);
    }
  }
  std::string known;
  for (auto kind : kKindNames) {
    known += known.empty() ? "" : ", ";
    known += kind;
  }
  throw InputError(
      text("unknown owner kind '", fitting(front_of(name, 64)), "': use one of ", known));
}

OwnerId intern_owner(OwnerKind kind, std::string_view name, std::string_view site) {
  check_name(name, "owner name");
  const auto name_id = intern(name);
  const auto site_id = intern(fitting(site));
  const auto key =
      (uint64_t{static_cast<uint32_t>(name_id)} << 32) | static_cast<uint32_t>(site_id);
  auto& owners = owner_table();
  std::lock_guard lock(owners.mutex);
  auto [found, is_new] = owners.ids.at(static_cast<size_t>(kind))
                             .try_emplace(key, static_cast<uint32_t>(owners.entries.size()));
  if (is_new) {
    if (owners.entries.size() > kIndexMask) {
      owners.ids.at(static_cast<size_t>(kind)).erase(found);
      throw InputError(text("more than ", kIndexMask,
                            " different owners: owners are kept forever, ",
                            "so put what changes every step into a scope's counter instead"));
    }
    owners.entries.push_back({name_id, site_id});
  }
  return OwnerId{(static_cast<uint32_t>(kind) << kIndexBits) | found->second};
}

Owner owner_of(OwnerId id) {
  Entry entry{};
  {
    auto& owners = owner_table();
    std::lock_guard lock(owners.mutex);
    const auto index = static_cast<uint32_t>(id) & kIndexMask;
    if (static_cast<size_t>(kind_of(id)) >= kOwnerKinds || index >= owners.entries.size()) {
      throw InputError(text("no owner has the id ", static_cast<uint32_t>(id),
                            ": use one that a lease or an event carries"));
    }
    entry = owners.entries[index];
  }
  return {kind_of(id), std::string(name_of(entry.name)), std::string(name_of(entry.site))};
}

std::string owner_text(OwnerId id) {
  const auto owner = owner_of(id);
  auto out = text(kind_name(owner.kind), " '", owner.name, '\'');
  if (!owner.site.empty()) {
    out += text(" (", owner.site, ')');
  }
  return out;
}

}  // namespace tenure
