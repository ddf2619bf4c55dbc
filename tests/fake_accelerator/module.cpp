// Python's door to the fake accelerator: `import fake_accelerator` installs the device "fake" and
// makes this module torch's device module for it (`torch.fake`). Signatures are those of
// fake_accelerator.h; streams are torch.Stream.

#include "current.h"
#include "fake_accelerator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;
namespace fake = fake_accelerator;

namespace {

// No work that runs under the fake's locks ever needs the GIL, so holding it there would be safe;
// it is let go because other threads may be copying a lot.
using NoGil = py::call_guard<py::gil_scoped_release>;

void set_memory_policy(bool poison_freed, bool reuse_freed, size_t device_bytes) {
  fake::set_memory_policy(
      {.poison_freed = poison_freed, .reuse_freed = reuse_freed, .device_bytes = device_bytes});
}

// What torch asks of a device module (torch.manual_seed, autocast, checkpoint).
void define_device_module(py::module_& m) {
  m.def("is_available", [] { return true; });
  m.def("is_initialized", [] { return true; });
  m.def("device_count", [] { return int{fake::kDeviceCount}; });
  m.def("current_device", [] { return int{fake::current_device()}; });
  m.def("_is_in_bad_fork", [] { return false; });
  m.def("manual_seed_all", [](const py::object& /*seed*/) {});  // random numbers are the CPU's
  m.def("get_amp_supported_dtype", [] {
    auto torch = py::module_::import("torch");
    return py::make_tuple(torch.attr("bfloat16"), torch.attr("float16"));
  });
}

}  // namespace

PYBIND11_MODULE(fake_accelerator, m) {
  auto torch = py::module_::import("torch");
  fake::install();
  torch.attr("utils").attr("rename_privateuse1_backend")("fake");

  m.attr("POISON") = int{fake::kPoison};
  m.def("reset", &fake::reset, NoGil());
  m.def("new_stream", &fake::new_stream, py::arg("device") = 0, NoGil());
  m.def("hold", &fake::hold, py::arg("stream"), NoGil());
  m.def("release", &fake::release, py::arg("stream"), NoGil());
  m.def("advance", &fake::advance, py::arg("stream"), py::arg("items") = 1, NoGil());
  m.def("held", &fake::held, py::arg("stream"), NoGil());
  m.def("pending", &fake::pending, py::arg("stream"), NoGil());
  m.def("shuffle", &fake::shuffle, py::arg("seed"), NoGil());
  m.def("run_in_order", &fake::run_in_order, NoGil());
  m.def("launch_memset", &fake::launch_memset, py::arg("tensor"), py::arg("byte"), NoGil());

  py::class_<fake::Waits>(m, "Waits")
      .def_readonly("host", &fake::Waits::host)
      .def_readonly("forced", &fake::Waits::forced);
  m.def("waits", &fake::waits, NoGil());

  const fake::MemoryPolicy defaults;
  m.def("set_memory_policy", &set_memory_policy, py::kw_only(),
        py::arg("poison_freed") = defaults.poison_freed,
        py::arg("reuse_freed") = defaults.reuse_freed,
        py::arg("device_bytes") = defaults.device_bytes, NoGil());

  m.def(
      "pinned_bytes",
      [] { return at::getHostAllocator(fake::kDeviceType)->get_stats().allocated_bytes.current; },
      NoGil());

  m.def(
      "tell_allocations",
      [](uintptr_t listener) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): that is how Python hands over a function
        fake::tell_allocations(reinterpret_cast<fake::AllocationListener>(listener));
      },
      py::arg("address_of_listener"));

  define_device_module(m);
  torch.attr("_register_device_module")("fake", m);
}
