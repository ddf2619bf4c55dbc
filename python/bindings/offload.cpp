// Offload: a session, and the two functions that autograd calls for what it saves.
#include "bindings.h"
#include "holders.h"
#include <tenure/core/storage_ref.h>
#include <tenure/core/where.h>
#include <tenure/offload/active.h>
#include <tenure/offload/outgoing.h>
#include <tenure/offload/session.h>

#include <pybind11/stl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>

namespace py = pybind11;
namespace offload = tenure::offload;

namespace {

// Whose end may wait for a thread that lets go of tensors, which may need the GIL for that.
struct EndWithoutGil {
  template <class T>
  void operator()(T* object) const {
    const py::gil_scoped_release no_gil;
    delete object;
  }
};
template <class T>
using WithoutGil = std::unique_ptr<T, EndWithoutGil>;

// Whether it is a view of a parameter or buffer, by what Python knows: frozen ones, and those that
// FSDP2 has gathered into a storage that was unknown when the session began.
bool is_parameter(const at::Tensor& tensor) {
  const auto base = tensor.is_view() ? tensor._base() : tensor;
  if (base.is_leaf() && base.requires_grad()) {
    return true;
  }
  if (!base.is_leaf()) {
    return false;
  }
  static const auto* const types =
      new py::tuple(py::make_tuple(py::module_::import("torch.nn").attr("Parameter"),
                                   py::module_::import("torch.nn").attr("Buffer")));
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(base));
  return py::isinstance(object, *types);
}

// Whether Python has made a class of its own of it, which C++ knows nothing of.
bool is_subclass(const py::object& object) {
  static const auto type = [](const char* module, const char* name) {
    return py::object(py::module_::import(module).attr(name)).release().ptr();
  };
  static const std::array plain{type("torch", "Tensor"), type("torch.nn", "Parameter"),
                                type("torch.nn", "Buffer")};
  return std::ranges::find(plain, py::type::handle_of(object).ptr()) == plain.end();
}

offload::Saved pack(offload::Session& session, const py::object& object) {
  const auto tensor = object.cast<at::Tensor>();
  if (is_subclass(object)) {
    return session.pass(tensor);
  }
  const auto known = is_parameter(tensor) ? std::optional(offload::Kept::parameter) : std::nullopt;
  const py::gil_scoped_release no_gil;
  return session.pack(tensor, known);
}

// Compiled backwards write into the memory of what they are given.
offload::Sharing sharing_here() {
  const auto node = torch::autograd::get_current_node();
  const bool compiled =
      node != nullptr && node->name().find("CompiledFunction") != std::string::npos;
  return compiled ? offload::Sharing::own : offload::Sharing::shared;
}

at::Tensor unpack(const offload::Saved& saved) {
  const py::gil_scoped_release no_gil;
  return offload::Session::unpack(saved, sharing_here());
}

std::vector<tenure::StorageRef> refs_of(const std::vector<at::Tensor>& tensors) {
  std::vector<tenure::StorageRef> out;
  for (const auto& tensor : tensors) {
    if (tensor.has_storage()) {
      out.emplace_back(tensor.storage());
    }
  }
  return out;
}

offload::Options options_from(const std::string& target, const std::string& folder,
                              std::optional<uint64_t> budget, std::optional<uint64_t> host_limit,
                              bool raise_when_full, int streams, std::optional<uint64_t> min_bytes,
                              bool recompute, bool moves, double audit) {
  offload::Options out;
  out.target = target == "copy"   ? offload::Target::copy
               : target == "disk" ? offload::Target::disk
                                  : offload::Target::host;
  out.folder = folder;
  out.budget = budget;
  out.host_limit = host_limit.value_or(out.host_limit);
  out.host_full = raise_when_full ? offload::HostFull::raise : offload::HostFull::keep;
  out.streams = static_cast<offload::Streams>(streams);
  out.min_bytes = min_bytes;
  out.recompute = recompute;
  out.moves = moves;
  out.audit = audit;
  return out;
}

py::dict kept_of(const offload::Stats& stats) {
  py::dict out;
  for (size_t i = 0; i < offload::kKeptReasons; ++i) {
    if (stats.kept[i].count > 0) {
      out[offload::kept_text(static_cast<offload::Kept>(i))] =
          py::make_tuple(stats.kept[i].count, stats.kept[i].bytes);
    }
  }
  return out;
}

template <auto Member>
uint64_t bytes_in(const offload::Stats& stats) {
  return (stats.*Member).bytes;
}
template <auto Member>
uint64_t count_in(const offload::Stats& stats) {
  return (stats.*Member).count;
}

// For C++ that offloads in a process where Python has the engine.
void push_hooks(offload::Session& session) {
  const py::gil_scoped_acquire gil;
  py::module_::import("torch")
      .attr("_C")
      .attr("_autograd")
      .attr("_push_saved_tensors_default_hooks")(
          py::cpp_function([&session](const py::object& tensor) { return pack(session, tensor); }),
          py::cpp_function(&unpack));
}

void pop_hooks() {
  const py::gil_scoped_acquire gil;
  py::module_::import("torch")
      .attr("_C")
      .attr("_autograd")
      .attr("_pop_saved_tensors_default_hooks")();
}

constexpr size_t kMostInside = 64;  // of wrappers that are looked into

// By the names that a class tells compilers, or else by its attributes.
std::vector<at::Tensor> wrapped(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  std::vector<at::Tensor> out;
  std::vector<py::object> open{py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor))};
  for (size_t i = 0; i < open.size() && i < kMostInside; ++i) {
    const auto object = open[i];
    const auto names = py::hasattr(object, "__tensor_flatten__")
                           ? py::list(object.attr("__tensor_flatten__")().cast<py::tuple>()[0])
                           : py::list(py::getattr(object, "__dict__", py::dict()));
    for (const auto& name : names) {
      const auto inner = py::getattr(object, name, py::none());
      if (!THPVariable_Check(inner.ptr())) {
        continue;
      }
      const auto& found = THPVariable_Unpack(inner.ptr());
      if (found.key_set().has(c10::DispatchKey::Python)) {
        open.push_back(inner);
      } else {
        out.push_back(found);
      }
    }
  }
  return out;
}

std::string_view action_name(offload::Action action) {
  switch (action) {
    case offload::Action::keep:
      return "keep";
    case offload::Action::offload:
      return "offload";
    case offload::Action::recompute:
      return "recompute";
  }
  return "";
}

void bind_fitted(py::module_& m) {
  using offload::Fitted;
  using offload::Point;
  using Row = Fitted::Row;
  py::class_<Row>(m, "FitRow")
      .def_property_readonly("module", [](const Row& self) { return tenure::name_of(self.module); })
      .def_property_readonly("op", [](const Row& self) { return tenure::name_of(self.op); })
      .def_property_readonly("action", [](const Row& self) { return action_name(self.action); })
      .def_readonly("count", &Row::count)
      .def_readonly("bytes", &Row::bytes)
      .def_readonly("seconds", &Row::seconds);
  py::class_<Fitted>(m, "FitPlan")
      .def_readonly("rows", &Fitted::rows)
      .def_readonly("saves_nothing", &Fitted::saves_nothing)
      .def_readonly("promised", &Fitted::promised)
      .def_readonly("least", &Fitted::least)
      .def_readonly("recompute_seconds", &Fitted::recompute_seconds)
      .def_readonly("exposed_seconds", &Fitted::exposed_seconds)
      .def_readonly("denied", &Fitted::denied);
  py::class_<Point>(m, "FitPoint")
      .def_readonly("peak", &Point::peak)
      .def_readonly("seconds", &Point::seconds)
      .def_readonly("kept", &Point::kept)
      .def_readonly("moved", &Point::moved)
      .def_readonly("recomputed", &Point::recomputed);
  // What runs on this thread from now on is this module's; the name of the one before.
  m.def("enter_module", [](const std::string& name) {
    auto& module = tenure::where().module;
    const auto outer = std::string(tenure::name_of(module));
    module = name.empty() ? tenure::NameId::none : tenure::intern(tenure::fitting(name));
    return outer;
  });
}

constexpr offload::LanguageHooks kPythonHooks{&push_hooks, &pop_hooks, &wrapped};

}  // namespace

void bind_offload(py::module_& m) {
  offload::install(&kPythonHooks);
  using offload::Stats;
  py::class_<Stats>(m, "OffloadStats")
      .def_readonly("steps", &Stats::steps)
      .def_property_readonly("mode", [](const Stats& self) { return mode_name(self.mode); })
      .def_property_readonly("saved_bytes", bytes_in<&Stats::saved>)
      .def_property_readonly("saved_storages", count_in<&Stats::saved>)
      .def_property_readonly("moved_out_bytes", bytes_in<&Stats::moved_out>)
      .def_property_readonly("moved_out_storages", count_in<&Stats::moved_out>)
      .def_property_readonly("moved_in_bytes", bytes_in<&Stats::moved_in>)
      .def_property_readonly("moved_in_storages", count_in<&Stats::moved_in>)
      .def_property_readonly("reused_bytes", bytes_in<&Stats::reused>)
      .def_property_readonly("kept", kept_of)
      .def_property_readonly("kept_bytes",
                             [](const Stats& self) {
                               uint64_t bytes = 0;
                               for (const auto& kept : self.kept) {
                                 bytes += kept.bytes;
                               }
                               return bytes;
                             })
      .def_readonly("host_bytes", &Stats::host_bytes)
      .def_readonly("most_host_bytes", &Stats::most_host_bytes)
      .def_readonly("pinned_bytes", &Stats::pinned_bytes)
      .def_readonly("slabs_taken", &Stats::slabs_taken)
      .def_readonly("disk_bytes", &Stats::disk_bytes)
      .def_readonly("file_bytes", &Stats::file_bytes)
      .def_readonly("tracked", &Stats::tracked)
      .def_readonly("exposed_seconds", &Stats::exposed_seconds)
      .def_readonly("out_bandwidth", &Stats::out_bandwidth)
      .def_readonly("in_bandwidth", &Stats::in_bandwidth)
      .def_readonly("peak", &Stats::peak)
      .def_readonly("promised", &Stats::promised)
      .def_readonly("least", &Stats::least)
      .def_readonly("budget", &Stats::budget)
      .def_readonly("risen", &Stats::risen)
      .def_property_readonly("dropped_bytes", bytes_in<&Stats::dropped>)
      .def_property_readonly("dropped_storages", count_in<&Stats::dropped>)
      .def_property_readonly("remade_bytes", bytes_in<&Stats::remade>)
      .def_property_readonly("remade_calls", count_in<&Stats::remade>)
      .def_readonly("audited", &Stats::audited)
      .def_readonly("diverged", &Stats::diverged)
      .def("__str__", [](const Stats& self) { return stats_text(self); });
  bind_fitted(m);

  const py::class_<offload::Saved, WithoutGil<offload::Saved>> saved(m, "OffloadSaved");
  tenure::python::register_holder(reinterpret_cast<PyTypeObject*>(saved.ptr()), [](auto* object) {
    const auto* mine = py::handle(object).cast<const offload::Saved*>();
    return mine == nullptr ? std::vector<c10::Storage>() : offload::Session::held(*mine);
  });
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&offload::stop_letting_go, py::call_guard<py::gil_scoped_release>()));

  using offload::Session;
  py::class_<Session, WithoutGil<Session>>(m, "OffloadSession")
      .def(py::init([](const std::string& target, const std::string& folder,
                       std::optional<uint64_t> budget, std::optional<uint64_t> host_limit,
                       bool raise_when_full, int streams, std::optional<uint64_t> min_bytes,
                       bool recompute, bool moves, double audit) {
             return WithoutGil<Session>(
                 new Session(options_from(target, folder, budget, host_limit, raise_when_full,
                                          streams, min_bytes, recompute, moves, audit)));
           }),
           py::arg("target"), py::arg("folder"), py::arg("budget"), py::arg("host_limit"),
           py::arg("raise_when_full"), py::arg("streams"), py::arg("min_bytes"),
           py::arg("recompute") = false, py::arg("moves") = true, py::arg("audit") = 0.0)
      .def(
          "never",
          [](Session& self, const std::vector<at::Tensor>& tensors) {
            self.never(refs_of(tensors));
          },
          py::call_guard<py::gil_scoped_release>())
      .def("begin", &Session::begin, py::call_guard<py::gil_scoped_release>())
      .def("end", &Session::end, py::call_guard<py::gil_scoped_release>())
      .def("abandon", &Session::abandon, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly(
          "active", py::cpp_function(&Session::active, py::call_guard<py::gil_scoped_release>()))
      .def_property_readonly(
          "measuring",
          py::cpp_function(&Session::measuring, py::call_guard<py::gil_scoped_release>()))
      .def("pack", &pack)
      .def_static("unpack", &unpack)
      .def("settle", &Session::settle, py::call_guard<py::gil_scoped_release>())
      .def("stats", &Session::stats, py::call_guard<py::gil_scoped_release>())
      .def("fitted", &Session::fitted, py::call_guard<py::gil_scoped_release>())
      .def("frontier", &Session::frontier, py::arg("points"),
           py::call_guard<py::gil_scoped_release>());
}
