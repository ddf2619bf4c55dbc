// What Python's own collector would free.
#pragma once

#include <tenure/inspect/graph.h>

#include <Python.h>

#include <unordered_set>

// Objects may not go while they are looked at.
class NoCollections {
 public:
  NoCollections() = default;
  ~NoCollections() {
    if (were_on_) {
      PyGC_Enable();
    }
  }
  NoCollections(const NoCollections&) = delete;
  NoCollections& operator=(const NoCollections&) = delete;

 private:
  const bool were_on_ = PyGC_Disable() != 0;
};

// Those of the graph's objects that a collection now would free. With the GIL.
std::unordered_set<const void*> garbage_in(const tenure::inspect::Graph& graph);
