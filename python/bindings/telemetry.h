// The bindings of telemetry, called by module.cpp.
#pragma once

#include "bindings.h"

void bind_flight(pybind11::module_& m);
void bind_ring(pybind11::module_& m);
void bind_telemetry(pybind11::module_& m);
