#include "objects.h"

#include <tenure/core/ledger.h>

namespace tenure {
namespace test {

std::atomic<int> Object::alive{0};

namespace {

void retain(void* object) { static_cast<Object*>(object)->references.fetch_add(1); }

void drop(void* object) {
  auto* held = static_cast<Object*>(object);
  if (held->references.fetch_sub(1) == 1) {
    if (held->on_death != nullptr) {
      held->on_death();
    }
    delete held;
  }
}

}  // namespace
}  // namespace test

LeaseTable::ObjectOps storage_ops() { return {test::retain, test::drop}; }

}  // namespace tenure
