#include "bindings.h"
#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/ledger.h>
#include <tenure/core/owner.h>
#include <tenure/core/scope.h>
#include <tenure/core/text.h>

#include <pybind11/stl.h>

namespace py = pybind11;
using tenure::OnClose;
using tenure::ScopeId;

namespace {

// tenure.scopes keeps the current scope's id in this contextvars.ContextVar. Owned forever.
PyObject* scope_variable = nullptr;

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

ScopeId id_in(PyObject* value) {
  const auto id = PyLong_AsUnsignedLongLong(value);
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return ScopeId::process;
  }
  return ScopeId{id};
}

// REQUIRES: the GIL. `thread` is this thread, or one that waits for this one.
ScopeId look_up(PyThreadState* thread) {
  PyObject* value = nullptr;
  if (thread == PyThreadState_Get()) {
    if (PyContextVar_Get(scope_variable, nullptr, &value) < 0) {
      PyErr_Clear();
    }
  } else if (thread->context != nullptr) {
    value = PyObject_GetItem(thread->context, scope_variable);
    if (value == nullptr) {
      PyErr_Clear();  // never set in that context
    }
  }
  if (value == nullptr) {
    return ScopeId::process;
  }
  const auto id = id_in(value);
  Py_DECREF(value);
  return id;
}

// CPython counts the changes of a thread's context, for ContextVar's own cache, in a field that
// its thread may read without the GIL. So an unchanged context costs a comparison, and the GIL is
// taken only after a task switch or a scope's entry, where backward() has let it go.
uint64_t context_version(void* thread) { return static_cast<PyThreadState*>(thread)->context_ver; }

void* this_python_thread() {
  return scope_variable == nullptr || finalizing() ? nullptr : PyGILState_GetThisThreadState();
}

ScopeId scope_of(void* thread) {
  if (scope_variable == nullptr || finalizing()) {
    return ScopeId::process;
  }
  const py::gil_scoped_acquire gil;
  return look_up(static_cast<PyThreadState*>(thread));
}

constexpr tenure::LanguageScopes kPythonScopes{this_python_thread, context_version, scope_of};

OnClose on_close_named(const std::string& name) {
  if (name == "report") {
    return OnClose::report;
  }
  if (name == "release") {
    return OnClose::release;
  }
  if (name == "raise") {
    return OnClose::raise;
  }
  throw tenure::InputError(tenure::text("unknown on_close '", tenure::front_of(name, 64),
                                        "': use 'report', 'release' or 'raise'"));
}

uint64_t open(const std::string& name, std::optional<int64_t> count, const std::string& on_close) {
  const auto action = on_close_named(on_close);
  tenure::check_name(name, "scope name");
  return static_cast<uint64_t>(tenure::open_scope({tenure::intern(name), count}, action));
}

// Another exception is on its way: what a subscriber throws goes to sys.unraisablehook.
void tell_clock_while_raising(const std::string& name, std::optional<int64_t> count) {
  try {
    const py::gil_scoped_release no_gil;
    tenure::tell_clock({tenure::intern(name), count});
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("a subscriber of tenure.on_step");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(py::str("a subscriber of tenure's clock").ptr());
  }
}

}  // namespace

void bind_scopes(py::module_& m) {
  m.def(
      "set_scope_variable",
      [](const py::object& variable) {
        scope_variable = py::object(variable).release().ptr();
        tenure::install(&kPythonScopes);
      },
      py::arg("variable"));
  m.def("open_scope", &open, py::arg("name"), py::arg("count"), py::arg("on_close"));
  m.def(
      "close_scope",
      [](uint64_t id, bool exception) {
        const auto ending = exception ? tenure::Ending::exception : tenure::Ending::normal;
        return tenure::close_scope(ScopeId{id}, ending);
      },
      py::arg("id"), py::arg("exception"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "tell_clock",
      [](const std::string& name, std::optional<int64_t> count) {
        tenure::tell_clock({tenure::intern(name), count});
      },
      py::arg("name"), py::arg("count"), py::call_guard<py::gil_scoped_release>());
  m.def("tell_clock_while_raising", &tell_clock_while_raising, py::arg("name"), py::arg("count"));
  m.def("scope_changed", &tenure::language_scope_changed);
  m.def("current_scope", [] { return static_cast<uint64_t>(tenure::current_scope()); });
  m.def(
      "scope_path", [](uint64_t id) { return tenure::ledger().scopes().path(ScopeId{id}); },
      py::arg("id"));
  m.def(
      "scope_is_open", [](uint64_t id) { return tenure::ledger().scopes().is_open(ScopeId{id}); },
      py::arg("id"));
  m.def("fork_generation", &tenure::fork_generation);

  py::class_<tenure::ScopeReport>(m, "ScopeReport")
      .def_readonly("scope", &tenure::ScopeReport::scope)
      .def_readonly("leases", &tenure::ScopeReport::leases)
      .def_readonly("bytes", &tenure::ScopeReport::bytes)
      .def_property_readonly("raises",
                             [](const tenure::ScopeReport& self) {
                               return !self.empty() && self.on_close == OnClose::raise;
                             })
      .def_property_readonly(
          "released",
          [](const tenure::ScopeReport& self) { return self.on_close == OnClose::release; })
      .def_property_readonly("owners",
                             [](const tenure::ScopeReport& self) {
                               std::vector<std::string> out;
                               for (const auto& [owner, totals] : self.left) {
                                 out.push_back(tenure::owner_text(owner));
                               }
                               return out;
                             })
      .def("__bool__", [](const tenure::ScopeReport& self) { return !self.empty(); })
      .def("__str__", &tenure::ScopeReport::text)
      .def("__repr__", [](const tenure::ScopeReport& self) {
        return "<tenure.ScopeReport: " + self.text() + ">";
      });
}
