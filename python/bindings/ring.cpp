// Rings: the last rows of a rank in a file, written from Python.
#include <tenure/telemetry/ring.h>

#include "telemetry.h"

#include <pybind11/stl.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace py = pybind11;
namespace telemetry = tenure::telemetry;

namespace {

int64_t now() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::nanoseconds(since).count();
}

void append(telemetry::Ring& ring, uint64_t step, const std::map<std::string, int64_t>& figures,
            std::optional<int64_t> when) {
  auto row = row_of(figures);
  row.step = step;
  row.when = when.value_or(now());
  ring.append(row);
}

std::unique_ptr<telemetry::Ring> make_ring(const std::string& folder, std::string host, int rank,
                                           int ranks, int stage, int stages, std::string role,
                                           int attempt, size_t slots) {
  const telemetry::RingIdentity identity{std::move(host), rank,   ranks, stage, stages,
                                         std::move(role), attempt};
  return std::make_unique<telemetry::Ring>(folder, identity, slots);
}

}  // namespace

void bind_ring(py::module_& m) {
  using telemetry::Ring;
  py::class_<Ring>(m, "TelemetryRing",
                   "The last rows of this rank in a file; a context manager that closes it.")
      .def(py::init(&make_ring), NoGil(), py::arg("folder"), py::kw_only(), py::arg("host"),
           py::arg("rank"), py::arg("ranks"), py::arg("stage") = 0, py::arg("stages") = 1,
           py::arg("role") = "", py::arg("attempt") = 0, py::arg("slots") = Ring::kSlots)
      .def_property_readonly("path", &Ring::path)
      .def_property_readonly("appended", &Ring::appended, "Rows so far.")
      .def("append", &append, py::arg("step"), py::arg("figures"), py::arg("when") = py::none(),
           "Figures by their keys' names; `when` in nanoseconds since 1970, by default now.")
      .def("flush", &Ring::flush, NoGil(), "Waits until the disk has all of it.")
      .def("note", &Ring::note, NoGil(), py::arg("reason"),
           "Tells readers why the process ends, should it be gone without close().")
      .def("close", &Ring::close, NoGil(), py::arg("reason") = "ended",
           "Tells readers that no more will come, and why. The first call counts.")
      .def("__enter__", [](Ring& self) -> Ring& { return self; })
      .def("__exit__", [](Ring& self, const py::args&) {
        const py::gil_scoped_release unlocked;
        self.close("ended");
      });
}
