#include <tenure/core/clock.h>

#include "bindings.h"

namespace py = pybind11;
using tenure::Clock;

void bind_clock(py::module_& m) {
  m.def("step_now", [] { return tenure::clock().now(); });
  m.def(
      "tick_explicit",
      [](uint64_t who, std::optional<uint64_t> number) {
        return tenure::clock().tick(Clock::Source::explicitly, who, number);
      },
      py::arg("who"), py::arg("number"));
  m.def(
      "tick_implicit",
      [](uint64_t who) { return tenure::clock().tick(Clock::Source::implicit, who); },
      py::arg("who"));

  m.def("leave_clock", [](uint64_t who) { tenure::clock().leave(who); }, py::arg("who"));

  py::class_<Clock::Subscription>(m, "Subscription").def("end", [](Clock::Subscription& self) {
    self = Clock::Subscription();
  });
  m.def(
      "on_step",
      [](py::function fn) {
        // The last copy may go on a thread without the GIL.
        std::shared_ptr<py::function> kept(new py::function(std::move(fn)), [](py::function* held) {
          const py::gil_scoped_acquire gil;
          delete held;
        });
        return tenure::clock().subscribe([kept](uint64_t step) {
          const py::gil_scoped_acquire gil;
          (*kept)(step);
        });
      },
      py::arg("fn"));
}
