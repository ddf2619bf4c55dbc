#include "collector.h"

#include <unordered_map>
#include <vector>

using tenure::inspect::Graph;
using tenure::inspect::NodeKind;

namespace {

// Note [What the collector would free]
// Python's collector frees objects to which all references come from objects that it frees too, as
// far as their tp_traverse tells it: what C++ refers to stays, and so does everything that this
// keeps. Autograd's nodes and hooks tell it of some references and not of others, so whether a
// cycle can be freed is not seen from its elements. The same count is made here, of the objects
// that no root reaches.
class Collection {
 public:
  explicit Collection(const Graph& graph) {
    for (auto node = uint32_t{0}; node < graph.size(); ++node) {
      auto* object = static_cast<PyObject*>(const_cast<void*>(graph.object(node)));
      if (!graph.reached(node) && graph.kind(node) == NodeKind::object &&
          PyObject_IS_GC(object) != 0 && PyObject_GC_IsTracked(object) != 0) {
        objects_.push_back(object);
        unexplained_.emplace(object, Py_REFCNT(object));
      }
    }
  }

  std::unordered_set<const void*> garbage() {
    for (auto* object : objects_) {
      Py_TYPE(object)->tp_traverse(object, &Collection::explain, this);
    }
    for (auto* object : objects_) {
      if (unexplained_[object] > 0) {
        open_.push_back(object);
      }
    }
    for (auto* object : open_) {
      unexplained_.erase(object);
    }
    while (!open_.empty()) {
      auto* object = open_.back();
      open_.pop_back();
      Py_TYPE(object)->tp_traverse(object, &Collection::stay, this);
    }
    std::unordered_set<const void*> out;
    for (const auto& [object, references] : unexplained_) {
      out.insert(object);
    }
    return out;
  }

 private:
  static int explain(PyObject* target, void* given) {
    auto& all = static_cast<Collection*>(given)->unexplained_;
    if (const auto found = all.find(target); found != all.end()) {
      --found->second;
    }
    return 0;
  }
  static int stay(PyObject* target, void* given) {
    auto& self = *static_cast<Collection*>(given);
    if (self.unexplained_.erase(target) > 0) {
      self.open_.push_back(target);
    }
    return 0;
  }

  std::vector<PyObject*> objects_;
  std::unordered_map<PyObject*, Py_ssize_t> unexplained_;
  std::vector<PyObject*> open_;  // those that stay, and what they keep is still to be seen
};

}  // namespace

std::unordered_set<const void*> garbage_in(const Graph& graph) {
  return Collection(graph).garbage();
}
