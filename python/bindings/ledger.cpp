#include <tenure/core/ledger.h>

#include "bindings.h"
#include <tenure/core/owner.h>
#include <tenure/core/storage_ref.h>

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <unordered_map>

namespace py = pybind11;
using tenure::ScopeId;
using tenure::Snapshot;
using tenure::Totals;

namespace {

// A read-only view of a column; the array keeps the snapshot alive.
template <class T>
auto column(std::vector<T> Snapshot::* member) {
  return [member](const py::object& self) {
    const auto& values = py::cast<const Snapshot&>(self).*member;
    py::array_t<T> view(static_cast<py::ssize_t>(values.size()), values.data(), self);
    view.attr("setflags")(py::arg("write") = false);
    return view;
  };
}

py::array_t<double> ages(const Snapshot& snapshot) {
  py::array_t<double> out(static_cast<py::ssize_t>(snapshot.size()));
  auto* to = out.mutable_data();
  for (const auto taken : snapshot.taken) {
    *to++ = static_cast<double>(snapshot.when - taken) / 1e9;
  }
  return out;
}

// Scopes of one path, open in several threads or tasks, are one row.
std::vector<std::pair<std::string, Totals>> by_path(const Snapshot& snapshot) {
  const auto& scopes = tenure::ledger().scopes();
  std::vector<std::string> paths;
  std::unordered_map<std::string, uint64_t> number_of_path;
  std::unordered_map<uint64_t, uint64_t> number_of_scope;
  Snapshot numbered;
  numbered.storage = snapshot.storage;
  numbered.bytes = snapshot.bytes;
  for (const auto scope : snapshot.scope) {
    const auto [number, is_new] = number_of_scope.try_emplace(scope);
    if (is_new) {
      auto path = scopes.path(ScopeId{scope});
      const auto [known, is_new_path] = number_of_path.try_emplace(path, paths.size());
      number->second = known->second;
      if (is_new_path) {
        paths.push_back(std::move(path));
      }
    }
    numbered.scope.push_back(number->second);
  }
  std::vector<std::pair<std::string, Totals>> out;
  for (const auto& [number, totals] : numbered.by_scope()) {
    out.emplace_back(paths[static_cast<size_t>(number)], totals);
  }
  return out;
}

py::dict by_kind(const tenure::KindTotals& totals) {
  py::dict out;
  for (size_t kind = 0; kind < tenure::kOwnerKinds; ++kind) {
    const auto name = tenure::kind_name(static_cast<tenure::OwnerKind>(kind));
    out[py::str(name.data(), name.size())] = totals.by_kind[kind];
  }
  return out;
}

}  // namespace

void bind_ledger(py::module_& m) {
  py::class_<Totals>(m, "Totals")
      .def_readonly("bytes", &Totals::bytes)
      .def_readonly("leases", &Totals::leases)
      .def_readonly("peak", &Totals::peak)
      .def("__repr__", [](const Totals& self) {
        return py::str("Totals(bytes={}, leases={}, peak={})")
            .format(self.bytes, self.leases, self.peak);
      });
  py::class_<tenure::KindTotals>(m, "KindTotals")
      .def_readonly("all", &tenure::KindTotals::all)
      .def_property_readonly("by_kind", &by_kind);

  py::class_<Snapshot, std::shared_ptr<Snapshot>>(m, "Snapshot")
      .def("__len__", &Snapshot::size)
      .def_property_readonly("storage", column(&Snapshot::storage))
      .def_property_readonly("bytes", column(&Snapshot::bytes))
      .def_property_readonly("scope", column(&Snapshot::scope))
      .def_property_readonly("owner", column(&Snapshot::owner))
      .def_property_readonly("device", column(&Snapshot::device))
      .def_property_readonly("age", &ages)
      .def(
          "by_owner",
          [](const Snapshot& self) {
            std::vector<std::pair<uint32_t, Totals>> out;
            for (const auto& [owner, totals] : self.by_owner()) {
              out.emplace_back(static_cast<uint32_t>(owner), totals);
            }
            return out;
          },
          NoGil())
      .def("by_scope", &by_path, NoGil())
      .def("bytes_once", &Snapshot::bytes_once, NoGil());

  m.def(
      "snapshot", [] { return std::make_shared<Snapshot>(tenure::ledger().snapshot()); }, NoGil());
  m.def("totals", [] { return tenure::ledger().totals(); }, NoGil());
  m.def("start_interval", [] { return tenure::ledger().start_interval(); }, NoGil());
  m.def(
      "owner_of",
      [](uint32_t id) {
        const auto owner = tenure::owner_of(tenure::OwnerId{id});
        return py::make_tuple(tenure::kind_name(owner.kind), owner.name, owner.site);
      },
      py::arg("id"));
  m.def(
      "device_from_tag", [](uint16_t tag) { return tenure::device_from_tag(tag).str(); },
      py::arg("tag"));
  m.def("owner_kinds", [] {
    std::vector<std::string_view> out;
    for (size_t kind = 0; kind < tenure::kOwnerKinds; ++kind) {
      out.push_back(tenure::kind_name(static_cast<tenure::OwnerKind>(kind)));
    }
    return out;
  });
}
