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

// tenure.scopes keeps the current tenure.Scope, or None, in this contextvars.ContextVar. Owned
// forever.
PyObject* scope_variable = nullptr;

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// What all tenure.Scope objects have in C++: the calls that open and close them. See Note [A scope
// is never half open].
struct PythonScope {
  std::optional<ScopeId> id;  // none before it is opened
  py::object outer;           // the tenure.Scope in which it was opened, or None
  uint32_t process = 0;
  unsigned long thread = 0;

  bool open() const { return id && tenure::ledger().scopes().is_open(*id); }
  bool of_the_parent_process() const { return id && process != tenure::fork_generation(); }
};

PythonScope& in(const py::handle& scope) { return scope.cast<PythonScope&>(); }

// The nearest scope that is open: this one or one around it; or None.
py::object nearest_open(py::object scope) {
  while (!scope.is_none() && !in(scope).open()) {
    scope = in(scope).outer;
  }
  return scope;
}

// None is the process, and so is one that was never opened.
ScopeId id_of(const py::object& scope) {
  return scope.is_none() ? ScopeId::process : in(scope).id.value_or(ScopeId::process);
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
  const auto found = nearest_open(py::reinterpret_steal<py::object>(value));
  return id_of(found);
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
  throw tenure::InputError(tenure::text("unknown on_close '",
                                        tenure::fitting(tenure::front_of(name, 64)),
                                        "': use 'report', 'release' or 'raise'"));
}

// Note [A scope is never half open]
// A signal's handler may raise between any two bytecodes, as Ctrl-C does. So what opens or closes a
// scope, and makes it or the one around it current, is one call that runs no bytecode meanwhile,
// and so are `__enter__` and `__exit__`: no Python function has an end at which they could be
// interrupted. What is said about it comes before, or when all is done.

py::object current_here() {
  PyObject* value = nullptr;
  if (PyContextVar_Get(scope_variable, nullptr, &value) < 0) {
    throw py::error_already_set();
  }
  return value == nullptr ? py::none() : py::reinterpret_steal<py::object>(value);
}

void make_current(const py::object& scope) {
  auto* token = PyContextVar_Set(scope_variable, scope.ptr());
  if (token == nullptr) {
    throw py::error_already_set();
  }
  Py_DECREF(token);
  tenure::language_scope_changed();
}

std::string name_of(const py::object& scope) { return scope.attr("name").cast<std::string>(); }

py::object enter(py::object self) {
  const auto checked = self.attr("_checked")().cast<py::tuple>();
  const auto name = checked[0].cast<std::string>();
  const auto on_close = on_close_named(checked[2].cast<std::string>());
  tenure::check_name(name, "scope name");
  const tenure::ScopeLabel label{tenure::intern(name), checked[1].cast<std::optional<int64_t>>()};
  auto& scope = in(self);
  scope.outer = nearest_open(current_here());
  scope.process = tenure::fork_generation();
  scope.thread = PyThread_get_thread_ident();
  scope.id = tenure::open_scope(label, on_close);
  make_current(self);
  return self;
}

// Whether the scope is current in this context, or one around the current one.
bool is_in_context(const py::object& scope) {
  auto at = current_here();
  while (!at.is_none() && !at.is(scope)) {
    at = in(at).outer;
  }
  return at.is(scope);
}

void require_own_thread(const py::object& self) {
  const auto& scope = in(self);
  const auto here = PyThread_get_thread_ident();
  if (here == scope.thread) {
    return;
  }
  const auto named = py::module_::import("tenure.scopes").attr("_thread_text");
  throw tenure::ScopeError(tenure::text("scope '", name_of(self), "' was opened by ",
                                        named(scope.thread).cast<std::string>(), " and ",
                                        named(here).cast<std::string>(),
                                        " tried to close it: close it where it was opened"));
}

void require_innermost(const py::object& self) {
  const auto innermost = nearest_open(current_here());
  if (innermost.is(self)) {
    return;
  }
  const auto path = tenure::ledger().scopes().path(id_of(innermost));
  throw tenure::ScopeError(tenure::text("scope '", name_of(self),
                                        "' is not the innermost scope here, '", path,
                                        "' is: close scopes where they were opened and in reverse "
                                        "order, as `with` blocks do"));
}

tenure::ScopeReport close_tree_scope(ScopeId id, tenure::Ending ending) {
  const py::gil_scoped_release no_gil;
  return tenure::close_scope(id, ending);
}

// Returns the report; None in a forked child, whose parent's scope it is.
py::object close_normally(const py::object& self) {
  auto& scope = in(self);
  if (scope.of_the_parent_process()) {
    make_current(py::none());
    return py::none();
  }
  if (!scope.id) {
    throw tenure::ScopeError(
        tenure::text("scope '", name_of(self), "' was never opened: use it as a `with` block"));
  }
  if (!scope.open()) {
    throw tenure::ScopeError(tenure::text("scope '", name_of(self),
                                          "' is closed already: close it once, or let its `with` "
                                          "block do it"));
  }
  require_own_thread(self);
  require_innermost(self);
  auto report = py::cast(close_tree_scope(*scope.id, tenure::Ending::normal));
  make_current(scope.outer);
  return report;
}

// Closes it because of an exception, after what was left open inside it in this context. Returns
// each with its report.
std::vector<std::pair<py::object, py::object>> unwind(const py::object& self, bool with_inner) {
  std::vector<py::object> ending;
  const bool current = is_in_context(self);
  if (current && with_inner) {
    for (auto at = nearest_open(current_here()); !at.is(self) && !at.is_none();
         at = nearest_open(in(at).outer)) {
      if (in(at).thread == in(self).thread) {  // another thread's moves up
        ending.push_back(at);
      }
    }
  }
  ending.push_back(self);
  std::vector<std::pair<py::object, py::object>> out;
  for (const auto& scope : ending) {
    if (in(scope).open()) {
      out.emplace_back(scope, py::cast(close_tree_scope(id_of(scope), tenure::Ending::exception)));
    }
  }
  if (current) {
    make_current(in(self).outer);
  }
  return out;
}

void leave(const py::object& self, const py::object& kind, const py::object& error,
           const py::object& /*trace*/) {
  if (kind.is_none()) {
    self.attr("_closed")(close_normally(self), 2);
    return;
  }
  const auto& scope = in(self);
  if (scope.of_the_parent_process()) {
    make_current(py::none());
    return;
  }
  if (!scope.open()) {
    return;
  }
  // Not a failure: what runs inside it goes on.
  const bool generator = PyErr_GivenExceptionMatches(kind.ptr(), PyExc_GeneratorExit) != 0;
  try {
    require_own_thread(self);
    const auto ended = unwind(self, !generator);
    for (const auto& [one, report] : ended) {
      one.attr("_unwound")(report);
    }
    const auto left =
        ended.empty() ? 0 : ended.back().second.cast<const tenure::ScopeReport&>().moved_up;
    if (generator && left != 0) {
      throw tenure::ScopeError(
          tenure::text("scope '", name_of(self), "' was closed while ",
                       tenure::count_text(left, "scope"), " inside it ", left == 1 ? "was" : "were",
                       " open, and moved to the one around it: close scopes in reverse order"));
    }
  } catch (const tenure::ScopeError& refused) {
    if (generator) {
      throw;  // nothing failed before this, and nobody would see a note
    }
    error.attr("add_note")(tenure::text("tenure: ", refused.what()));
  }
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
  py::class_<PythonScope>(m, "ScopeBase")
      .def(py::init<>())
      .def_property_readonly("_id",
                             [](const PythonScope& self) {
                               return self.id ? std::optional(static_cast<uint64_t>(*self.id))
                                              : std::nullopt;
                             })
      .def_property_readonly("is_open", &PythonScope::open, "Whether leases can be taken in it.")
      .def("__enter__", &enter, "Opens it inside the current scope.")
      .def("_close", &close_normally)
      .def("__exit__", &leave, py::arg("kind"), py::arg("error"), py::arg("trace"),
           "Closes it. When an exception ends it, nothing is raised or warned about on top.\n\n"
           "Scopes that were opened inside it and are still open end with it then, innermost "
           "first;\n"
           "those of other threads and tasks move to the scope around it. Where it cannot be "
           "closed,\n"
           "the exception gets a note that says why.");
  m.def(
      "tell_clock",
      [](const std::string& name, std::optional<int64_t> count) {
        tenure::tell_clock({tenure::intern(name), count});
      },
      py::arg("name"), py::arg("count"), py::call_guard<py::gil_scoped_release>());
  m.def("tell_clock_while_raising", &tell_clock_while_raising, py::arg("name"), py::arg("count"));
  m.def("current_scope", [] { return static_cast<uint64_t>(tenure::current_scope()); });
  m.def(
      "scope_path", [](uint64_t id) { return tenure::ledger().scopes().path(ScopeId{id}); },
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
