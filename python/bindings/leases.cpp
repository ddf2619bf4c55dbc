#include "bindings.h"
#include "holders.h"
#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>
#include <tenure/core/scope.h>
#include <tenure/core/storage_ref.h>
#include <tenure/core/text.h>
#include <tenure/core/ticks.h>

#include <pybind11/stl.h>

namespace py = pybind11;
using tenure::Lease;
using tenure::LeaseRow;
using tenure::ScopeId;

namespace {

LeaseRow lease_row(const Lease& lease) {
  const auto row = lease.row();
  if (lease.inherited()) {
    throw tenure::LeaseError("this lease is the parent process's: hold the tensor again to ask");
  }
  if (!row) {
    throw tenure::LeaseError("this lease was released: hold the tensor again to ask about it");
  }
  return *row;
}

// What Python shows of a lease, on the lease itself and on the rows of an explanation.
template <class Class, class Get>
void bind_row(Class& c, Get get) {
  using Self = typename Class::type;
  c.def_property_readonly("nbytes", [get](const Self& self) { return get(self).bytes; })
      .def_property_readonly(
          "kind",
          [get](const Self& self) { return tenure::kind_name(tenure::kind_of(get(self).owner)); })
      .def_property_readonly(
          "owner", [get](const Self& self) { return tenure::owner_of(get(self).owner).name; })
      .def_property_readonly(
          "site", [get](const Self& self) { return tenure::owner_of(get(self).owner).site; })
      .def_property_readonly(
          "scope",
          [get](const Self& self) { return tenure::ledger().scopes().path(get(self).scope); })
      .def_property_readonly(
          "device", [get](const Self& self) { return tenure::device_from_tag(get(self).device); })
      .def_property_readonly("age", [get](const Self& self) {
        return static_cast<double>(tenure::coarse_nanoseconds() - get(self).taken) / 1e9;
      });
}

Lease hold(const at::Tensor& tensor, const std::string& kind, const std::string& name,
           const std::string& site, std::optional<uint64_t> scope) {
  const auto owner = tenure::intern_owner(tenure::kind_named(kind), name, site);
  if (!scope) {
    return tenure::hold(tensor, owner);
  }
  if (!tenure::ledger().scopes().is_open(ScopeId{*scope})) {
    throw tenure::ScopeError(
        "a tensor cannot be held in a scope that is not open: hold it inside "
        "the scope's `with` block");
  }
  return tenure::hold(tensor, owner, ScopeId{*scope});
}

// Freeing may take long. The lease is taken out of its object while the GIL still keeps other
// threads from it.
void release_without_gil(Lease& lease) {
  auto ending = std::move(lease);
  const py::gil_scoped_release no_gil;
  ending.release();
}

ScopeId id_of(const py::object& scope) {
  if (!py::isinstance(scope, py::module_::import("tenure.scopes").attr("Scope"))) {
    throw tenure::InputError(tenure::text("Lease.transfer() needs a tenure.Scope or None and got ",
                                          Py_TYPE(scope.ptr())->tp_name));
  }
  return ScopeId{py::cast<uint64_t>(scope.attr("id"))};
}

std::vector<c10::Storage> storages_of(const Lease* lease) {
  try {
    return lease == nullptr ? std::vector<c10::Storage>() : std::vector{lease->storage()};
  } catch (const tenure::LeaseError&) {
    return {};  // released
  }
}

std::string lease_text(const Lease& lease) {
  const auto row = lease.row();
  if (!row) {
    return "<tenure.Lease: released>";
  }
  return "<tenure.Lease: " + tenure::owner_text(row->owner) + " in scope '" +
         tenure::ledger().scopes().path(row->scope) + "'>";
}

}  // namespace

void bind_leases(py::module_& m) {
  py::class_<LeaseRow> row(m, "LeaseInfo", "A lease, as it was when it was asked for.");
  bind_row(row, [](const LeaseRow& self) { return self; });
  row.def("__repr__", [](const LeaseRow& self) {
    return "<tenure.LeaseInfo: " + tenure::owner_text(self.owner) + ">";
  });

  py::class_<Lease> lease(
      m, "Lease",
      "Keeps a tensor's storage alive until it is released, its scope ends, or it goes.\n\n"
      "Made by tenure.hold(); a `with` block releases it at its end.");
  tenure::python::register_holder(reinterpret_cast<PyTypeObject*>(lease.ptr()), [](auto* object) {
    return storages_of(py::handle(object).cast<const Lease*>());
  });
  bind_row(lease, lease_row);
  lease.def_property_readonly("held", &Lease::held)
      .def(
          "release",
          [](Lease& self, const std::optional<tenure::Fence>& after) {
            if (self.inherited()) {
              return;  // a forked child has nothing to release
            }
            if (!self.held()) {
              throw tenure::LeaseError(
                  "this lease was released before, by a call or by the end of its scope: release a "
                  "lease once, or use it as a `with` block");
            }
            if (after) {
              self.release(*after);
            } else {
              release_without_gil(self);
            }
          },
          py::arg("after") = std::nullopt)
      .def(
          "transfer",
          [](Lease& self, const py::object& scope) {
            self.transfer(scope.is_none() ? ScopeId::process : id_of(scope));
          },
          py::arg("scope"))
      .def("storage", &Lease::storage)
      .def("__enter__",
           [](py::object self) {
             lease_row(self.cast<const Lease&>());  // or raises
             return self;
           })
      .def("__exit__",
           [](Lease& self, const py::args& /*exception*/) { release_without_gil(self); })
      .def("__repr__", &lease_text);

  m.def("hold", &hold, py::arg("tensor"), py::arg("kind"), py::arg("name"), py::arg("site"),
        py::arg("scope"));
}
