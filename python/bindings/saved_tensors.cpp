// Note [Reading what nodes save]
// torch generates, for each of its nodes, properties of the node's Python class: `_saved_self`
// unpacks and refuses a tensor that was changed in place since, as weights are by every optimizer
// step; `_raw_saved_self` gives the SavedVariable itself, which tells what it holds in any case.
// The getters need no Python object of the node, only something in its shape that points to it, so
// none is made: a hundred thousand nodes are read without leaving anything behind.
#include "saved_tensors.h"

#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/utils/pybind.h>

#include <string_view>
#include <typeindex>
#include <unordered_map>
#include <vector>

namespace py = pybind11;
using torch::autograd::Node;
using torch::autograd::SavedVariable;

namespace tenure::python {
namespace {

constexpr std::string_view kRaw = "_raw_saved_";

struct NodeClass {
  PyTypeObject* type = nullptr;
  std::vector<const PyGetSetDef*> saved;
};

// Classes are torch's and live for good.
const NodeClass& class_of(Node& node) {
  static auto* known = new std::unordered_map<std::type_index, NodeClass>;
  const auto [found, added] = known->try_emplace(std::type_index(typeid(node)));
  if (added) {
    const auto object =
        py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node.getptr()));
    auto& made = found->second;
    made.type = Py_TYPE(object.ptr());
    for (const auto* property = made.type->tp_getset;
         property != nullptr && property->name != nullptr; ++property) {
      if (std::string_view(property->name).starts_with(kRaw)) {
        made.saved.push_back(property);
      }
    }
  }
  return found->second;
}

void visit_value(const char* name, const py::handle& value, const SavedVisitor& visit) {
  if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    for (const auto& each : value) {
      visit_value(name, each, visit);
    }
  } else if (py::isinstance<SavedVariable>(value)) {
    visit(name, value.cast<const SavedVariable&>());
  }
}

}  // namespace

PyTypeObject* saved_tensor_type() {
  static auto* type =
      reinterpret_cast<PyTypeObject*>(py::type::of<SavedVariable>().release().ptr());
  return type;
}

const SavedVariable& saved_in(PyObject* object) {
  return py::handle(object).cast<const SavedVariable&>();
}

bool each_saved(Node& node, const SavedVisitor& visit) {
  const auto& found = class_of(node);
  if (found.saved.empty()) {
    return false;
  }
  torch::autograd::THPCppFunction shape{};
  auto* self = reinterpret_cast<PyObject*>(&shape);
  Py_SET_REFCNT(self, 1);
  Py_SET_TYPE(self, found.type);
  shape.cdata = node.getptr();
  for (const auto* property : found.saved) {
    const auto value = py::reinterpret_steal<py::object>(property->get(self, property->closure));
    if (value) {
      visit_value(property->name + kRaw.size(), value, visit);
    } else {
      PyErr_Clear();  // a list that was given up after backward
    }
  }
  return true;
}

}  // namespace tenure::python
