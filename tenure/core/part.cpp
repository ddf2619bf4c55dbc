#include <tenure/core/part.h>

#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/names.h>
#include <tenure/core/text.h>

#include <algorithm>
#include <mutex>

namespace tenure {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<const Part>> parts;

  Registry() { protect_across_fork(mutex); }
};

Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

PartRegistration register_part(Part part) {
  check_name(part.name, "part name");
  auto kept = std::make_shared<const Part>(std::move(part));
  auto& known = registry();
  std::lock_guard lock(known.mutex);
  if (std::ranges::any_of(known.parts,
                          [&](const auto& other) { return other->name == kept->name; })) {
    throw InputError(text("a part named '", kept->name, "' is registered already"));
  }
  known.parts.push_back(kept);
  return PartRegistration(std::move(kept));
}

PartRegistration& PartRegistration::operator=(PartRegistration&& other) noexcept {
  std::swap(part_, other.part_);
  return *this;
}

PartRegistration::~PartRegistration() {
  if (part_ == nullptr) {
    return;
  }
  auto& known = registry();
  std::lock_guard lock(known.mutex);
  std::erase(known.parts, part_);
}

std::vector<std::shared_ptr<const Part>> parts() {
  auto& known = registry();
  std::lock_guard lock(known.mutex);
  return known.parts;
}

std::shared_ptr<const Part> part_named(std::string_view name) {
  const auto all = parts();
  const auto found =
      std::ranges::find_if(all, [&](const auto& part) { return part->name == name; });
  return found == all.end() ? nullptr : *found;
}

}  // namespace tenure
