// The bindings of telemetry, called by module.cpp.
#pragma once

#include "bindings.h"

void bind_telemetry(pybind11::module_& m);
