#include "bindings.h"
#include <tenure/core/error.h>
#include <tenure/core/explain.h>
#include <tenure/core/fence.h>
#include <tenure/core/ledger.h>
#include <tenure/core/release.h>
#include <tenure/core/storage_ref.h>
#include <tenure/core/text.h>

#include <pybind11/stl.h>

namespace py = pybind11;
using tenure::Explanation;
using tenure::Fence;
using tenure::StorageRef;

namespace {

StorageRef no_ref(const py::object& other) {
  throw tenure::InputError(
      tenure::text("tenure.StorageRef() needs a torch.Tensor or a torch.UntypedStorage and got ",
                   Py_TYPE(other.ptr())->tp_name));
}

void bind_ref(py::module_& m) {
  py::class_<StorageRef>(m, "StorageRef",
                         "Which storage a tensor is on, without keeping it alive.\n\n"
                         "Equal only to references to the same storage, also after it has gone and "
                         "its memory\nis another one's.")
      .def(py::init<const at::Tensor&>(), py::arg("tensor"))
      .def(py::init<const c10::Storage&>(), py::arg("storage"))
      .def(py::init(&no_ref), py::arg("other"))
      .def_property_readonly("alive", &StorageRef::alive)
      .def_property_readonly("nbytes", &StorageRef::nbytes)
      .def_property_readonly("device", &StorageRef::device)
      .def("lock", &StorageRef::lock)
      .def("__eq__", [](const StorageRef& self, const StorageRef& other) { return self == other; })
      .def("__eq__", [](const StorageRef& /*self*/, const py::object& /*other*/) { return false; })
      .def("__hash__", &StorageRef::hash)
      .def("__copy__", [](const StorageRef& self) { return self; })
      .def(
          "__deepcopy__", [](const StorageRef& self, const py::dict& /*memo*/) { return self; },
          py::arg("memo"))
      .def("__repr__",
           [](const StorageRef& self) { return "<tenure.StorageRef: " + self.text() + ">"; });
}

void bind_fence(py::module_& m) {
  py::class_<Fence>(m, "Fence",
                    "A point in a device's work: ready when all that was queued before it is done."
                    "\n\nOn the CPU a fence is ready at once.")
      .def(py::init<>())
      .def_static(
          "record", [](const c10::Stream& stream) { return Fence::record(stream); },
          py::arg("stream"))
      .def_static(
          "record", [](c10::Device device) { return Fence::record(device); }, py::arg("device"))
      .def("ready", &Fence::ready, NoGil())
      .def(
          "wait", [](const Fence& self) { self.wait(); }, NoGil())
      .def(
          "wait", [](const Fence& self, const c10::Stream& stream) { self.wait(stream); },
          py::arg("stream"), NoGil());
}

void bind_explanation(py::module_& m) {
  py::class_<Explanation>(m, "Explanation")
      .def_readonly("storage", &Explanation::storage)
      .def_readonly("nbytes", &Explanation::nbytes)
      .def_readonly("references", &Explanation::references)
      .def_property_readonly("others", &Explanation::others)
      .def_readonly("held_by", &Explanation::held_by)
      .def_readonly("released", &Explanation::released)
      .def_readonly("leases", &Explanation::leases)
      .def("__str__", &Explanation::text)
      .def("__repr__",
           [](const Explanation& self) { return "<tenure.Explanation: " + self.text() + ">"; });
}

}  // namespace

void bind_storage(py::module_& m) {
  bind_ref(m);
  bind_fence(m);
  bind_explanation(m);
  m.def("explain", &tenure::explain, py::arg("tensor"));
  m.def(
      "release_storage",
      [](const at::Tensor& tensor, std::string by, std::string site, const Fence& fence) {
        tenure::release_storage(tensor, {std::move(by), std::move(site)}, fence);
      },
      py::arg("tensor"), py::arg("by"), py::arg("site"), py::arg("fence"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "refill_storage",
      [](const at::Tensor& tensor, const std::optional<at::Tensor>& source) {
        if (source) {
          tenure::refill_storage(tensor, *source);
        } else {
          tenure::refill_storage(tensor);
        }
      },
      py::arg("tensor"), py::arg("source"), py::call_guard<py::gil_scoped_release>());
  m.def("released_text", &tenure::released_text, py::arg("storage"));
  m.def(
      "is_released",
      [](const at::Tensor& tensor) {
        return tenure::is_released(tenure::storage_of(tensor, "asked about"));
      },
      py::arg("tensor"));
}
