#include "holders.h"

#include <algorithm>
#include <utility>

namespace tenure::python {
namespace {

// Few, and asked for every object of a process.
std::vector<std::pair<PyTypeObject*, StoragesHeld>>& holders() {
  static auto* const known = new std::vector<std::pair<PyTypeObject*, StoragesHeld>>;
  return *known;
}

}  // namespace

void register_holder(PyTypeObject* type, StoragesHeld held) { holders().emplace_back(type, held); }

StoragesHeld holder(PyTypeObject* type) {
  const auto found = std::ranges::find(holders(), type, [](const auto& one) { return one.first; });
  return found == holders().end() ? nullptr : found->second;
}

}  // namespace tenure::python
