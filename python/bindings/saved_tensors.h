// What an autograd node saved for backward, read one by one and without unpacking. With the GIL.
#pragma once

#include <tenure/core/torch_compat.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/python_headers.h>

#include <functional>

namespace tenure::python {

using SavedVisitor =
    std::function<void(const char* name, const torch::autograd::SavedVariable& saved)>;

// Calls `visit` for each, also those that were changed in place since or given up after backward
// (which have no tensor any more). False if the node's class does not tell what it saves.
bool each_saved(torch::autograd::Node& node, const SavedVisitor& visit);

// The class of Python objects that are a saved tensor by themselves, as checkpointing makes them.
PyTypeObject* saved_tensor_type();
// REQUIRES: an object of that class.
const torch::autograd::SavedVariable& saved_in(PyObject* object);

}  // namespace tenure::python
