#include "arenas.h"

#include <tenure/inspect/observer.h>

#include <Python.h>

namespace {

PyObjectArenaAllocator python_maps;  // what Python had

void* take(void* /*context*/, size_t bytes) {
  auto* arena = python_maps.alloc(python_maps.ctx, bytes);
  if (arena != nullptr) {
    tenure::inspect::observer().interpreter_took(static_cast<int64_t>(bytes));
  }
  return arena;
}

void give_back(void* /*context*/, void* arena, size_t bytes) {
  python_maps.free(python_maps.ctx, arena, bytes);
  tenure::inspect::observer().interpreter_took(-static_cast<int64_t>(bytes));
}

bool is_watched(const PyObjectArenaAllocator& allocator) { return allocator.alloc == &take; }

}  // namespace

void watch_arenas() {
  PyObjectArenaAllocator now{};
  PyObject_GetArenaAllocator(&now);
  if (is_watched(now)) {
    return;
  }
  python_maps = now;
  PyObjectArenaAllocator ours{nullptr, &take, &give_back};
  PyObject_SetArenaAllocator(&ours);
}

void unwatch_arenas() {
  PyObjectArenaAllocator now{};
  PyObject_GetArenaAllocator(&now);
  if (is_watched(now)) {  // else someone else has taken our place, and calls us
    PyObject_SetArenaAllocator(&python_maps);
  }
}
