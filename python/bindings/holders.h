// Objects of Tenure's that keep storages alive, which neither Python's collector nor autograd
// shows. With the GIL.
#pragma once

#include <c10/core/Storage.h>
#include <torch/csrc/python_headers.h>

#include <vector>

namespace tenure::python {

// What an object of a class holds at this moment. Must not wait.
using StoragesHeld = std::vector<c10::Storage> (*)(PyObject* object);

void register_holder(PyTypeObject* type, StoragesHeld held);
// Null if objects of the class hold none.
StoragesHeld holder(PyTypeObject* type);

}  // namespace tenure::python
