// The bindings of the store, called by module.cpp.
#pragma once

#include "bindings.h"

void bind_store(pybind11::module_& m);
