// What makes up tenure._C: one function a concept, called by module.cpp.
#pragma once

#include <torch/csrc/utils/pybind.h>

// For functions that neither need Python nor may keep other threads from it.
using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

void bind_clock(pybind11::module_& m);
void bind_errors(pybind11::module_& m);
void bind_inspect(pybind11::module_& m);
void bind_leases(pybind11::module_& m);
void bind_ledger(pybind11::module_& m);
void bind_offload(pybind11::module_& m);
void bind_pipeline(pybind11::module_& m);
void bind_references(pybind11::module_& m);
void bind_sample(pybind11::module_& m);
void bind_scopes(pybind11::module_& m);
void bind_shard(pybind11::module_& m);
void bind_storage(pybind11::module_& m);
void bind_train(pybind11::module_& m);
void bind_trainer(pybind11::module_& m);
