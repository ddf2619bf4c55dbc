// The bindings of telemetry, called by module.cpp.
#pragma once

#include "bindings.h"
#include <tenure/telemetry/keys.h>

#include <cstdint>
#include <map>
#include <string>

// Figures by their keys' names. Throws InputError for one that is none.
tenure::telemetry::Row row_of(const std::map<std::string, int64_t>& figures);

void bind_flight(pybind11::module_& m);
void bind_ring(pybind11::module_& m);
void bind_telemetry(pybind11::module_& m);
