// What Python asks of the graph of references.
#include "bindings.h"
#include "holders.h"
#include "reference_graph.h"
#include "threads.h"
#include <tenure/core/ledger.h>
#include <tenure/core/owner.h>
#include <tenure/inspect/dominators.h>
#include <tenure/inspect/graph.h>
#include <tenure/inspect/observer.h>

#include <ATen/SequenceNumber.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace py = pybind11;
using tenure::inspect::Graph;
using tenure::inspect::NodeKind;
using tenure::python::bytes_of;

namespace {

// The node that adds gradients up for a leaf, while any graph leads to it.
auto accumulator_of(const at::Tensor& leaf) {
  return torch::autograd::impl::try_get_grad_accumulator(leaf);
}

// All that is found is kept from enter() to exit(), which ends even what refers to this in turn:
// the caller's own variables are found too.
class References {
 public:
  References(py::list skip, py::list late) : skip_(std::move(skip)), late_(std::move(late)) {}

  void enter() { found_.emplace(skip_, late_); }

  // The same once all other threads rest; see Note [When another thread rests]. The GIL is kept
  // meanwhile, so that who needs it comes to rest. False, and nothing is looked at, if that takes
  // longer.
  bool enter_at_rest(double seconds, const std::string& engine, const std::string& library) {
    using namespace std::chrono_literals;
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (int seen = 0; seen < 3;) {
      seen = tenure::python::others_rest(engine, library) ? seen + 1 : 0;
      if (seen < 3 && std::chrono::steady_clock::now() > until) {
        return false;
      }
      std::this_thread::sleep_for(300us);
    }
    enter();
    return true;
  }
  void exit() {
    found_.reset();
    gone_.clear();
  }

  uint32_t size() const { return all().graph().size(); }
  size_t references() const { return all().graph().references(); }

  // The storages that were found: memory's address and size, node, whether a root reaches it, and
  // the address of the storage itself.
  py::list storages() const {
    py::list out;
    for (const auto node : all().storages()) {
      auto& storage = all().storage(node);
      out.append(
          py::make_tuple(reinterpret_cast<uintptr_t>(storage._mutable_data_ptr_no_checks().get()),
                         bytes_of(storage), node, all().graph().reached(node),
                         reinterpret_cast<uintptr_t>(&storage)));
    }
    return out;
  }

  // Bytes of the storages that were found, by where they are.
  std::map<std::string, uint64_t> bytes_by_device() const {
    std::map<std::string, uint64_t> out;
    for (const auto node : all().storages()) {
      const auto& storage = all().storage(node);
      out[storage.device().str()] += bytes_of(storage);
    }
    return out;
  }

  // Storages that were there before watching began are watched from now on.
  size_t adopt() const {
    size_t adopted = 0;
    for (const auto node : all().storages()) {
      adopted += tenure::inspect::observer().adopt(all().storage(node)) ? 1 : 0;
    }
    return adopted;
  }

  // The same for those whose memory is not torch's.
  void find_foreign() const {
    for (const auto node : all().storages()) {
      tenure::inspect::observer().find_foreign(all().storage(node));
    }
  }

  // References to the storage: found, and in truth.
  std::pair<uint32_t, size_t> counts(uint32_t node) const {
    return {all().graph().referrers(node), all().use_count(node)};
  }

  // References to the storage and to the tensors on it that nobody found, and that are not leases:
  // C++ code has them.
  size_t unseen(uint32_t node) const {
    const auto missing = [&](uint32_t at) {
      const auto [found, actual] = counts(at);
      return actual > found ? actual - found : 0;
    };
    size_t tensors = 0;
    size_t leases = tenure::ledger().leases().rows_of(&all().storage(node)).size();
    for (const auto from : all().graph().referring_to(node)) {
      if (all().graph().kind(from) == NodeKind::tensor) {
        tensors += missing(from);
      } else if (is_lease(from) && leases > 0) {
        --leases;
      }
    }
    const auto own = missing(node);
    return tensors + (own > leases ? own - leases : 0);
  }

  // Whether a root reaches it, the way, the cycle, and whether Python's collector can free that.
  py::tuple retention(uint32_t node) const {
    const auto found = all().graph().retention(node);
    const bool free = all().collectable(found.cycle);
    return py::make_tuple(found.reached, all().describe(found.path), all().describe(found.cycle),
                          free);
  }

  // The nodes of the way that retention() describes.
  std::vector<uint32_t> way(uint32_t node) const { return all().graph().retention(node).path; }

  // One that refers to another, as an element of a way.
  py::tuple element(uint32_t node, uint32_t next) const {
    return all().describe(node, all().graph().object(next));
  }

  // How many different labels lie behind each element of the path to `node`.
  std::vector<uint32_t> labels_behind(uint32_t node, const std::vector<uint32_t>& nodes,
                                      const std::vector<uint64_t>& labels) const {
    return all().graph().labels_behind(all().graph().retention(node).path, nodes, labels);
  }

  // For each element of the way to `node`: the bytes that would go with it.
  std::vector<uint64_t> gone_with(uint32_t node) const {
    if (gone_.empty()) {
      gone_ = tenure::inspect::gone_with(all().graph().dominators(), weights());
    }
    std::vector<uint64_t> out;
    for (const auto element : all().graph().retention(node).path) {
      out.push_back(element < gone_.size() ? gone_[element] : 0);
    }
    return out;
  }

  // For each element of the way to `node`: whether the way's own reference to it is the only one,
  // and every way to the node leads through it, so that both would go with that reference.
  std::vector<bool> goes_with_reference(uint32_t node) const {
    const auto path = all().graph().retention(node).path;
    const auto references = all().graph().references_from_outside(path);
    std::vector<bool> out;
    for (size_t i = 0; i < path.size(); ++i) {
      out.push_back(all().graph().reached(node) && references[i] == 1 &&
                    all().graph().dominates(path[i], node));
    }
    return out;
  }

  // The autograd nodes that hand gradients to a leaf, the oldest first, each with how many nodes
  // its thread had made before it.
  std::vector<std::pair<uint32_t, uint64_t>> users_of(const at::Tensor& leaf) const {
    const auto accumulator = accumulator_of(leaf);
    const auto& graph = all().graph();
    const auto at = accumulator ? graph.find(accumulator.get()) : Graph::kNone;
    if (at == Graph::kNone) {
      return {};
    }
    std::vector<std::pair<uint32_t, uint64_t>> out;
    for (const auto from : graph.referring_to(at)) {
      if (graph.kind(from) == NodeKind::autograd) {
        const auto* node = static_cast<const torch::autograd::Node*>(graph.object(from));
        out.emplace_back(from, node->sequence_nr());
      }
    }
    std::ranges::stable_sort(out, {}, &std::pair<uint32_t, uint64_t>::second);
    return out;
  }

  // All nodes of autograd that are alive.
  size_t autograd_nodes() const {
    const auto& graph = all().graph();
    size_t found = 0;
    for (uint32_t node = 0; node < graph.size(); ++node) {
      found += graph.kind(node) == NodeKind::autograd ? 1 : 0;
    }
    return found;
  }

  // The cycles that no root holds: elements of one way around, bytes that they keep, whether
  // Python's collector can free them.
  py::list cycles(size_t most) const {
    py::list out;
    for (const auto& [nodes, bytes] : all().graph().cycles(weights(), most)) {
      const bool free = all().collectable(nodes);
      out.append(py::make_tuple(all().describe(nodes), bytes, free));
    }
    return out;
  }

  // Storages that a root reaches, by what the way to them begins with: bytes, count, one of them.
  std::vector<std::tuple<uint64_t, uint32_t, uint32_t>> by_beginning() const {
    const auto beginnings = all().graph().beginnings();
    std::map<uint32_t, std::tuple<uint64_t, uint32_t, uint32_t>> sums;
    for (const auto node : all().storages()) {
      if (all().graph().reached(node)) {
        auto& [bytes, count, example] = sums[beginnings[node]];
        bytes += bytes_of(all().storage(node));
        ++count;
        example = node;
      }
    }
    std::vector<std::tuple<uint64_t, uint32_t, uint32_t>> out;
    for (const auto& [beginning, sum] : sums) {
      out.push_back(sum);
    }
    return out;
  }

  // But for leases, of which the ledger tells.
  std::vector<uint32_t> referring_to(uint32_t node) const {
    auto found = all().graph().referring_to(node);
    std::erase_if(found, [&](uint32_t from) { return is_lease(from); });
    return found;
  }

  // The shortest ways through autograd to one of its nodes, each from a tensor that something other
  // than autograd holds.
  std::vector<std::vector<uint32_t>> heads_of(uint32_t node) const {
    const auto& graph = all().graph();
    const auto is_autograd = [&](uint32_t at) {
      return at != Graph::kNone && graph.kind(at) == NodeKind::autograd;
    };
    std::vector<uint32_t> nodes;
    for (uint32_t at = 0; at < graph.size(); ++at) {
      if (is_autograd(at)) {
        nodes.push_back(at);
      }
    }
    auto references = graph.referring_to(nodes);
    std::ranges::stable_sort(references, {}, &std::pair<uint32_t, uint32_t>::second);

    std::unordered_map<uint32_t, uint32_t> towards{{node, Graph::kNone}};
    std::vector<std::vector<uint32_t>> out;
    std::vector<uint32_t> queue{node};
    for (size_t i = 0; i < queue.size(); ++i) {
      const auto to = queue[i];
      for (const auto& [from, _] :
           std::ranges::equal_range(references, to, {}, &std::pair<uint32_t, uint32_t>::second)) {
        if (!towards.emplace(from, to).second) {
          continue;
        }
        if (is_autograd(from)) {
          queue.push_back(from);
        } else if (graph.kind(from) == NodeKind::tensor && !is_autograd(graph.parent(from))) {
          auto& way = out.emplace_back();
          for (auto at = from; at != Graph::kNone; at = towards[at]) {
            way.push_back(at);
          }
        }
      }
    }
    return out;
  }

  std::optional<uint32_t> node_of(const at::Tensor& tensor) const {
    const auto node = all().graph().find(tensor.storage().unsafeGetStorageImpl());
    return node == Graph::kNone ? std::nullopt : std::optional(node);
  }

 private:
  bool is_lease(uint32_t node) const {
    const auto* object = static_cast<const PyObject*>(all().graph().object(node));
    return all().graph().kind(node) == NodeKind::object &&
           tenure::python::holder(Py_TYPE(object)) != nullptr;
  }

  const tenure::python::ReferenceGraph& all() const {
    if (!found_) {
      throw std::logic_error("References are there inside a with statement only");
    }
    return *found_;
  }

  // The bytes of each storage that would be freed if all that refers to it here went.
  std::vector<uint64_t> weights() const {
    std::vector<uint64_t> out(all().graph().size(), 0);
    for (const auto node : all().storages()) {
      const auto [found, actual] = counts(node);
      out[node] = found >= actual ? bytes_of(all().storage(node)) : 0;
    }
    return out;
  }

  py::list skip_, late_;
  std::optional<tenure::python::ReferenceGraph> found_;
  mutable std::vector<uint64_t> gone_;  // by node, once asked for
};

}  // namespace

void bind_references(py::module_& m) {
  // Much cheaper than the graph, for programs that have just begun.
  m.def("any_tensor", [] {
    const auto all = py::module_::import("gc").attr("get_objects")().cast<py::list>();
    return std::ranges::any_of(all, [](const py::handle& object) {
      return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(THPVariableClass));
    });
  });
  // Found so that no code of the program runs. There are many objects and few classes.
  m.def(
      "instances",
      [](const std::vector<py::type>& kinds) {
        std::unordered_map<PyTypeObject*, bool> wanted;
        py::list out;
        const auto all = py::module_::import("gc").attr("get_objects")().cast<py::list>();
        for (const auto& object : all) {
          auto* type = Py_TYPE(object.ptr());
          auto [found, fresh] = wanted.try_emplace(type, false);
          if (fresh) {
            found->second = std::ranges::any_of(kinds, [&](const py::type& kind) {
              return PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(kind.ptr())) != 0;
            });
          }
          if (found->second) {
            out.append(object);
          }
        }
        return out;
      },
      py::arg("kinds"));
  // How many nodes of graphs that are alive hand gradients to each of these leaves.
  m.def(
      "users_of_leaves",
      [](const std::vector<at::Tensor>& leaves) {
        std::vector<int64_t> out;
        for (const auto& leaf : leaves) {
          const auto accumulator = accumulator_of(leaf);
          out.push_back(accumulator ? static_cast<int64_t>(accumulator.use_count()) - 1 : 0);
        }
        return out;
      },
      py::arg("leaves"));
  // How many autograd nodes the calling thread has made.
  m.def("nodes_made", &at::sequence_number::peek);
  // The gradients of tensors, None where there is none, or nothing at all while another thread may
  // free them: see Note [When another thread rests]. `engine` is the file that tells.
  m.def(
      "gradients",
      [](const std::vector<at::Tensor>& tensors,
         const std::string& engine) -> std::optional<std::vector<std::optional<at::Tensor>>> {
        if (tenure::python::others_change_gradients(engine)) {
          return std::nullopt;
        }
        std::vector<std::optional<at::Tensor>> out;
        for (const auto& tensor : tensors) {
          const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
          const bool has = meta != nullptr && meta->grad_.defined();
          out.push_back(has ? std::optional<at::Tensor>(meta->grad_) : std::nullopt);
        }
        return out;
      },
      py::arg("tensors"), py::arg("engine"));
  // Without making a Python object of the storage, which would stay.
  m.def(
      "storage_bytes",
      [](const at::Tensor& tensor) -> std::optional<size_t> {
        if (!tensor.defined() || !tensor.has_storage()) {
          return std::nullopt;
        }
        return bytes_of(*tensor.storage().unsafeGetStorageImpl());
      },
      py::arg("tensor"));
  py::class_<References>(m, "References")
      .def(py::init<py::list, py::list>(), py::arg("skip"), py::arg("late") = py::list())
      .def("__enter__",
           [](py::object self) {
             self.cast<References&>().enter();
             return self;
           })
      .def("enter_at_rest", &References::enter_at_rest, py::arg("seconds"), py::arg("engine"),
           py::arg("library"))
      .def("__exit__", [](References& self, const py::args&) { self.exit(); })
      .def_property_readonly("size", &References::size)
      .def_property_readonly("references", &References::references)
      .def("storages", &References::storages)
      .def("bytes_by_device", &References::bytes_by_device)
      .def("adopt", &References::adopt)
      .def("find_foreign", &References::find_foreign)
      .def("counts", &References::counts, py::arg("node"))
      .def("unseen", &References::unseen, py::arg("node"))
      .def("retention", &References::retention, py::arg("node"))
      .def("way", &References::way, py::arg("node"))
      .def("element", &References::element, py::arg("node"), py::arg("next"))
      .def("labels_behind", &References::labels_behind, py::arg("node"), py::arg("nodes"),
           py::arg("labels"))
      .def("gone_with", &References::gone_with, py::arg("node"))
      .def("goes_with_reference", &References::goes_with_reference, py::arg("node"))
      .def("users_of", &References::users_of, py::arg("leaf"))
      .def("autograd_nodes", &References::autograd_nodes)
      .def("cycles", &References::cycles, py::arg("most"))
      .def("by_beginning", &References::by_beginning)
      .def("referring_to", &References::referring_to, py::arg("node"))
      .def("heads_of", &References::heads_of, py::arg("node"))
      .def("node_of", &References::node_of, py::arg("tensor"));
}
