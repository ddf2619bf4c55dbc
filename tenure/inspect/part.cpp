#include <tenure/core/part.h>

#include <tenure/core/storage_ref.h>
#include <tenure/core/text.h>
#include <tenure/inspect/modules.h>
#include <tenure/inspect/observer.h>
#include <tenure/inspect/part.h>

namespace tenure::inspect {
namespace {

std::string origin_text(const StorageRef& ref) {
  const auto storage = ref.lock();
  const auto birth = storage ? observer().births().find(storage->data()) : std::nullopt;
  if (!birth) {
    return {};
  }
  const auto origin = origin_of(birth->origin);
  const auto module = module_name(origin.module);
  return text(module, module.empty() || origin.op == NameId::none ? "" : " ", name_of(origin.op));
}

}  // namespace

void register_inspect() {
  // Leaked: whoever asks may ask late.
  static const auto* const registration = new PartRegistration(register_part(
      {.name = "inspect", .origin = origin_text, .copied = [](auto& copy, const auto& original) {
         observer().welcome_copy(copy, original);
       }}));
  (void)registration;
}

}  // namespace tenure::inspect
