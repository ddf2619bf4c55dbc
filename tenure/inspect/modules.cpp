#include <tenure/inspect/modules.h>

#include <tenure/core/fork.h>

#include <mutex>
#include <optional>
#include <unordered_map>

namespace tenure::inspect {
namespace {

struct Modules {
  Modules() { protect_across_fork(mutex); }
  std::mutex mutex;
  std::unordered_map<const void*, uint32_t> numbers;
  std::unordered_map<uint32_t, const void*> unnamed;
  std::vector<std::string> names{""};  // 0 is no module
};

Modules& module_table() {
  static auto* instance = new Modules;
  return *instance;
}

}  // namespace

uint32_t module_number(const void* module) {
  if (module == nullptr) {
    return 0;
  }
  auto& known = module_table();
  std::lock_guard lock(known.mutex);
  const auto [found, added] =
      known.numbers.try_emplace(module, static_cast<uint32_t>(known.names.size()));
  if (added) {
    known.names.emplace_back();
    known.unnamed.emplace(found->second, module);
  }
  return found->second;
}

std::vector<std::pair<uint32_t, const void*>> unnamed_modules() {
  auto& known = module_table();
  std::lock_guard lock(known.mutex);
  return {known.unnamed.begin(), known.unnamed.end()};
}

void name_module(uint32_t number, std::string name) {
  auto& known = module_table();
  std::lock_guard lock(known.mutex);
  if (number < known.names.size()) {
    known.names[number] = std::move(name);
    known.unnamed.erase(number);
  }
}

void forget_module(const void* module) {
  auto& known = module_table();
  std::lock_guard lock(known.mutex);
  known.numbers.erase(module);
}

std::string module_name(uint32_t number) {
  auto& known = module_table();
  std::lock_guard lock(known.mutex);
  return number < known.names.size() ? known.names[number] : "";
}

}  // namespace tenure::inspect
