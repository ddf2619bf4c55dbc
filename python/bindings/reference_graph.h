// The graph of references of this process: Python objects, running frames, tensors, autograd nodes,
// storages.
#pragma once

#include <tenure/inspect/graph.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace tenure::python {

// 0 for the storage of a fake tensor whose size is a symbol.
size_t bytes_of(const c10::StorageImpl& storage);

// Its variables, or what it is in the middle of: a list whose append() it calls, say.
struct RunningFrame {
  PyCodeObject* code;
  int instruction;
  bool named;                     // whether the values are those of its variables, in order
  std::vector<PyObject*> values;  // only to compare with
};

// Note [When it is safe to look]
// The GIL keeps Python still, not C++: a thread inside backward() changes the graph without it. The
// watcher therefore builds the graph on the training thread itself, between two steps, or through a
// pending call between two bytecodes of the main thread. What is said of the graph afterwards is
// said in Python, and meanwhile other threads may run: all that was found is kept until then, and
// what a backward may change (what nodes saved) is read once, here.
class ReferenceGraph {
 public:
  // `skip` are objects that are not followed: the watcher's own. Frames whose file is one of `late`
  // come after all other roots: what a library has in hand says less than who gave it that.
  // REQUIRES: the GIL, here and when it goes.
  ReferenceGraph(const pybind11::list& skip, const pybind11::list& late);
  ~ReferenceGraph();
  ReferenceGraph(const ReferenceGraph&) = delete;
  ReferenceGraph& operator=(const ReferenceGraph&) = delete;

  const inspect::Graph& graph() const { return graph_; }
  const std::vector<uint32_t>& storages() const { return storages_; }
  c10::StorageImpl& storage(uint32_t node) const {
    return *static_cast<c10::StorageImpl*>(const_cast<void*>(graph_.object(node)));
  }
  // The references to a storage or a tensor that others than this have.
  size_t use_count(uint32_t node) const;

  // Whether Python's collector can free a cycle: it breaks where any one of its objects is freed.
  bool collectable(const std::vector<uint32_t>& cycle) const;

  // Elements of a way as (kind, object or None, text, name of the next element in this one or "").
  pybind11::list describe(const std::vector<uint32_t>& path) const;
  // One element, and the name of what comes next in it.
  pybind11::tuple describe(uint32_t node, const void* next) const;

 private:
  class Walk;
  void keep();
  // The name under which an autograd node saved something, "" if it did not.
  std::string saved_name(uint32_t node, const void* what) const;

  inspect::Graph graph_;
  std::deque<RunningFrame> frames_;
  std::vector<std::pair<PyObject*, const char*>> roots_;
  std::vector<uint32_t> storages_;
  struct Saved {
    uint32_t node;
    const void* what;  // a tensor, or the object that a hook has made of it
    const char* name;
  };
  std::vector<Saved> saved_;                 // ordered by node
  std::unordered_set<const void*> garbage_;  // what Python's collector would free

  using NodePtr = decltype(std::declval<torch::autograd::Node&>().getptr());
  std::vector<PyObject*> kept_objects_;
  std::vector<at::Tensor> kept_tensors_;
  std::vector<NodePtr> kept_nodes_;
  std::vector<c10::Storage> kept_storages_;
};

}  // namespace tenure::python
