#include "arenas.h"
#include "bindings.h"
#include "frames.h"
#include <tenure/core/error.h>
#include <tenure/core/storage_ref.h>
#include <tenure/core/text.h>
#include <tenure/inspect/modules.h>
#include <tenure/inspect/observer.h>
#include <tenure/inspect/recorded.h>
#include <tenure/inspect/verdict.h>
#include <tenure/inspect/watch.h>

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <unordered_set>

namespace py = pybind11;
using namespace tenure::inspect;

namespace {

Level level_named(const std::string& name) {
  if (name == "count") {
    return Level::count;
  }
  if (name == "trace") {
    return Level::trace;
  }
  if (name == "deep") {
    return Level::deep;
  }
  throw tenure::InputError(tenure::text("unknown level '",
                                        tenure::fitting(tenure::front_of(name, 64)),
                                        "': use 'count', 'trace' or 'deep'"));
}

const char* level_name(Level level) {
  constexpr std::array names{"off", "count", "trace", "deep"};
  return names.at(static_cast<size_t>(level));
}

py::dict origin_dict(uint32_t id) {
  const auto origin = origin_of(OriginId{id});
  py::dict out;
  out["op"] = tenure::name_of(origin.op);
  out["site"] = tenure::name_of(origin.site);
  out["forward_site"] = tenure::name_of(origin.forward_site);
  out["stack"] = tenure::name_of(origin.stack);
  out["module"] = module_name(origin.module);
  out["phase"] = tenure::phase_name(origin.phase);
  out["device"] = origin.device;
  return out;
}

// Storages alive of these origins: (address, id, bytes, step).
py::list alive_of(const std::unordered_set<uint32_t>& origins) {
  std::vector<Birth> found;
  {
    const py::gil_scoped_release nogil;
    found = observer().births().alive();
    std::erase_if(found, [&](const Birth& birth) {
      return !origins.contains(static_cast<uint32_t>(birth.origin));
    });
  }
  py::list out;
  for (const auto& birth : found) {
    out.append(
        py::make_tuple(reinterpret_cast<uintptr_t>(birth.data), birth.id, birth.bytes, birth.step));
  }
  return out;
}

// All storages alive that were seen born: (address, bytes).
std::vector<std::pair<uintptr_t, uint64_t>> alive_storages() {
  std::vector<std::pair<uintptr_t, uint64_t>> out;
  for (const auto& birth : observer().births().alive()) {
    out.emplace_back(reinterpret_cast<uintptr_t>(birth.data), birth.bytes);
  }
  return out;
}

py::dict row_dict(const StepRow& row) {
  py::dict out;
  each_figure(row, [&](const char* name, const auto& value) { out[name] = value; });
  return out;
}

StepRow row_from(const py::dict& given) {
  StepRow row;
  each_figure(row, [&](const char* name, auto& value) {
    if (given.contains(name)) {
      value = given[name].cast<std::remove_reference_t<decltype(value)>>();
    }
  });
  return row;
}

// Of the tensor's storage, if it was seen born.
std::optional<Birth> birth_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return std::nullopt;
  }
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  return observer().births().find(storage->_mutable_data_ptr_no_checks().get());
}

std::optional<uint32_t> origin_of_storage(const at::Tensor& tensor) {
  const auto birth = birth_of(tensor);
  return birth ? std::optional(static_cast<uint32_t>(birth->origin)) : std::nullopt;
}

py::dict share_dict(const Share& share) {
  py::dict out;
  out["name"] = share.name;
  out["per_step"] = share.per_step;
  out["grows"] = share.grows;
  return out;
}

py::dict suspect_dict(const Suspect& suspect) {
  py::dict out;
  out["origin"] = static_cast<uint32_t>(suspect.origin);
  out["per_step"] = suspect.per_step;
  out["confidence"] = suspect.confidence;
  out["bytes"] = suspect.bytes;
  out["count"] = suspect.count;
  out["since"] = suspect.since;
  out["one"] = suspect.one;
  return out;
}

py::dict verdict_dict(const Verdict& verdict) {
  py::dict out;
  out["verdict"] = judgement_name(verdict.judgement);
  out["steps"] = verdict.steps;
  out["since"] = verdict.since;
  out["per_step"] = verdict.per_step;
  out["confidence"] = verdict.confidence;
  out["seconds_per_step"] = verdict.seconds_per_step;
  out["total"] = share_dict(verdict.total);
  out["peak"] = share_dict(verdict.peak);
  py::list shares;
  for (const auto& share : verdict.shares) {
    shares.append(share_dict(share));
  }
  out["shares"] = shares;
  const auto dicts = [](const std::vector<Suspect>& given) {
    py::list all;
    for (const auto& suspect : given) {
      all.append(suspect_dict(suspect));
    }
    return all;
  };
  out["suspects"] = dicts(verdict.suspects);
  out["filling"] = dicts(verdict.filling);
  const auto numbers = [](const std::vector<OriginId>& origins) {
    py::list found;
    for (const auto origin : origins) {
      found.append(static_cast<uint32_t>(origin));
    }
    return found;
  };
  out["doubtful"] = numbers(verdict.doubtful);
  out["leading"] = numbers(verdict.leading);
  out["why"] = verdict.why;
  return out;
}

// Accused, bounded, and graphs that are kept: bytes a step, bytes, since.
using GraphsRow = std::tuple<double, int64_t, uint64_t>;
using EvidenceRow =
    std::tuple<std::set<uint32_t>, std::set<uint32_t>, std::map<uint32_t, GraphsRow>>;

Evidence evidence_of(const EvidenceRow& given) {
  const auto& [accused, bounded, graphs] = given;
  Evidence out;
  for (const auto origin : accused) {
    out.accused.insert(OriginId{origin});
  }
  for (const auto origin : bounded) {
    out.bounded.insert(OriginId{origin});
  }
  for (const auto& [origin, row] : graphs) {
    const auto& [per_step, bytes, since] = row;
    out.graphs[OriginId{origin}] = {per_step, bytes, since};
  }
  return out;
}

using CutRow = std::tuple<uint64_t, int64_t, int64_t, int64_t>;  // step, bytes, count, birth steps

py::dict judge_recorded(const std::vector<py::dict>& given,
                        const std::map<uint32_t, std::vector<CutRow>>& cut_rows, bool steps,
                        const EvidenceRow& evidence) {
  std::vector<StepRow> rows;
  rows.reserve(given.size());
  for (const auto& row : given) {
    rows.push_back(row_from(row));
  }
  Cuts cuts;
  for (const auto& [origin, series] : cut_rows) {
    for (const auto& [step, bytes, count, birth_steps] : series) {
      cuts[OriginId{origin}].push_back({step, OriginId{origin}, bytes, count, birth_steps});
    }
  }
  return verdict_dict(
      judge(rows, cuts, steps ? Unit::step : Unit::interval, evidence_of(evidence)));
}

// A recording that is to be judged: its path, whether rows are steps, what is known of origins.
using Case = std::tuple<std::string, bool, EvidenceRow>;

// The same of recordings, several at a time on threads of C++, which a Python that ends can still
// start: for each the verdict with its last step, or why it cannot be read.
py::list judge_files(const std::vector<Case>& cases, size_t threads) {
  struct Judged {
    Verdict verdict;
    uint64_t last = 0;
    std::string error;
  };
  std::vector<Judged> judged(cases.size());
  const auto judge_one = [&](size_t number) {
    const auto& [path, steps, evidence] = cases[number];
    auto& out = judged[number];
    try {
      const auto recorded = read_recording(path);
      out.verdict = judge(recorded.rows, recorded.cuts, steps ? Unit::step : Unit::interval,
                          evidence_of(evidence));
      out.last = recorded.rows.empty() ? 0 : recorded.rows.back().step;
    } catch (const std::exception& error) {
      out.error = error.what();
    }
  };
  {
    const py::gil_scoped_release nogil;
    std::atomic<size_t> next{0};
    const auto work = [&] {
      for (auto number = next++; number < cases.size(); number = next++) {
        judge_one(number);
      }
    };
    std::vector<std::jthread> others;
    for (size_t i = 1; i < std::min(threads, cases.size()); ++i) {
      others.emplace_back(work);
    }
    work();
  }
  py::list out;
  for (const auto& one : judged) {
    if (!one.error.empty()) {
      out.append(one.error);
      continue;
    }
    auto told = verdict_dict(one.verdict);
    told["last"] = one.last;
    out.append(told);
  }
  return out;
}

py::dict judge_live(const Watch& watch) {
  Verdict verdict;
  {
    const py::gil_scoped_release nogil;
    verdict = judge(watch.rows(), watch.cuts(), watch.ticking() ? Unit::step : Unit::interval,
                    watch.evidence());
  }
  return verdict_dict(verdict);
}

// What tensors are to the program: their kinds and names. Those that nobody saw born are left out.
void mark(Watch& watch,
          const std::vector<std::tuple<at::Tensor, std::string, std::string>>& tensors) {
  std::vector<Mark> marks;
  for (const auto& [tensor, kind, name] : tensors) {
    if (const auto birth = birth_of(tensor)) {
      marks.push_back({birth->id, kind, name});
    }
  }
  watch.add(std::move(marks));
}

py::list rows_of(const Watch& watch) {
  py::list out;
  for (const auto& row : watch.rows()) {
    out.append(row_dict(row));
  }
  return out;
}

// {origin: [(step, bytes, count, birth steps)]}
py::dict cuts_of(const Watch& watch) {
  py::dict out;
  for (const auto& [origin, series] : watch.cuts()) {
    py::list steps;
    for (const auto& cut : series) {
      steps.append(py::make_tuple(cut.step, cut.bytes, cut.count, cut.birth_steps));
    }
    out[py::int_(static_cast<uint32_t>(origin))] = steps;
  }
  return out;
}

}  // namespace

void bind_inspect(py::module_& m) {
  m.def(
      "install_frames",
      [](const std::string& torch, std::vector<std::string> library, const py::object& code) {
        if (!PyCode_Check(code.ptr())) {
          throw tenure::InputError("a code object is needed");
        }
        install_python_frames(torch, std::move(library), code.ptr());
      },
      py::arg("torch"), py::arg("library"), py::arg("module_call"));
  m.def("can_record", &can_record);
  m.def("origin", &origin_dict, py::arg("id"));
  m.def("judge", &judge_recorded, py::arg("rows"), py::arg("cuts"), py::arg("steps"),
        py::arg("evidence"));
  m.def("judge_files", &judge_files, py::arg("cases"), py::arg("threads"));
  m.def("alive_of", &alive_of, py::arg("origins"));
  m.def("origin_of", &origin_of_storage, py::arg("tensor"));
  m.def("alive_storages", &alive_storages, py::call_guard<py::gil_scoped_release>());
  m.def("held_bytes", [] { return observer().births().flow().bytes; });
  m.def("observer_bytes", [] { return observer().births().footprint(); });
  m.def(
      "device_born",
      [](uintptr_t address, uint64_t bytes, int8_t index, const std::string& site) {
        const c10::Device device(c10::DeviceType::CUDA, index);
        // NOLINTNEXTLINE(performance-no-int-to-ptr)
        observer().device_born_at(reinterpret_cast<const void*>(address), bytes,
                                  tenure::device_tag(device), tenure::intern(site));
      },
      py::arg("address"), py::arg("bytes"), py::arg("index"), py::arg("site"));
  m.def(
      "device_died",
      [](uintptr_t address, uint64_t bytes) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr)
        observer().device_died(reinterpret_cast<const void*>(address), bytes);
      },
      py::arg("address"), py::arg("bytes"));
  m.def("see_devices", [] { observer().see_devices(); });
  m.def("observed_level", [] { return level_name(observer().level()); });
  m.def(
      "step_down", [](const std::string& level) { observer().step_down(level_named(level)); },
      py::arg("level"));
  m.def(
      "welcome",
      [](const py::object& storage) {
        auto* impl = py::cast<c10::Storage>(storage).unsafeGetStorageImpl();
        return observer().welcome(*impl);
      },
      py::arg("storage"));
  // Of those whose memory is not the allocator's: shared with another process, or numpy's.
  m.def(
      "welcome_shared",
      [](const py::object& storage) {
        observer().welcome_foreign(*py::cast<c10::Storage>(storage).unsafeGetStorageImpl(),
                                   Observer::Memory::shared);
      },
      py::arg("storage"));
  m.def(
      "welcome_wrapped",
      [](const at::Tensor& tensor) {
        if (tensor.has_storage()) {
          observer().welcome_foreign(*tensor.storage().unsafeGetStorageImpl(),
                                     Observer::Memory::heap);
        }
      },
      py::arg("tensor"));
  m.def("watch_arenas", &watch_arenas);
  m.def("unwatch_arenas", &unwatch_arenas);
  m.def("unnamed_modules", [] {
    std::vector<std::pair<uint32_t, uintptr_t>> out;
    for (const auto& [number, address] : unnamed_modules()) {
      out.emplace_back(number, reinterpret_cast<uintptr_t>(address));
    }
    return out;
  });
  m.def("name_module", &name_module, py::arg("number"), py::arg("name"));
  m.def(
      "forget_module",
      [](uintptr_t address) {
        forget_module(reinterpret_cast<const void*>(address));  // NOLINT(performance-no-int-to-ptr)
      },
      py::arg("address"));

  // Between two bytecodes of the main thread, soon. Dropped if too much is waiting already.
  m.def(
      "call_on_main_thread",
      [](py::object call) {
        const auto run = [](void* given) {
          const auto function = py::reinterpret_steal<py::object>(static_cast<PyObject*>(given));
          auto* result = PyObject_CallNoArgs(function.ptr());
          Py_XDECREF(result);
          return result == nullptr ? -1 : 0;
        };
        if (Py_AddPendingCall(run, call.ptr()) == 0) {
          call.release();
        }
      },
      py::arg("call"));

  py::class_<Redactor>(m, "Redactor")
      .def(py::init<>())
      .def(py::init<std::string_view, const std::vector<std::string>&>(), py::arg("key"),
           py::arg("known"))
      .def("__call__", &Redactor::operator(), py::arg("text"));

  py::class_<Watch>(m, "Watch")
      .def(py::init([](const std::string& level, const std::string& path, uint64_t cap,
                       std::vector<std::pair<std::string, std::string>> meta,
                       const Redactor& redact) {
             return std::make_unique<Watch>(
                 WatchOptions{level_named(level), path, cap, std::move(meta), redact});
           }),
           py::arg("level"), py::arg("path"), py::arg("cap"), py::arg("meta"), py::arg("redact"))
      .def("end_interval", &Watch::end_interval, py::arg("number"))
      .def(
          "step_up",
          [](Watch& self, const std::string& level, uint64_t cap) {
            self.step_up(level_named(level), cap);
          },
          py::arg("level"), py::arg("cap"))
      .def("due", &Watch::due)
      .def("judge", &judge_live)
      .def("rows", &rows_of)
      .def("cuts", &cuts_of)
      .def(
          "add_holding",
          [](Watch& self, uint64_t step, uint32_t origin, double bytes_per_step, int64_t bytes,
             int64_t count, std::string path) {
            self.add(
                Holding{step, OriginId{origin}, bytes_per_step, bytes, count, std::move(path)});
          },
          py::arg("step"), py::arg("origin"), py::arg("bytes_per_step"), py::arg("bytes"),
          py::arg("count"), py::arg("path"))
      .def("mark", &mark, py::arg("tensors"))
      .def(
          "set_evidence",
          [](Watch& self, const EvidenceRow& evidence) {
            self.set_evidence(evidence_of(evidence));
          },
          py::arg("evidence"))
      .def("note", &Watch::note, py::arg("kind"), py::arg("text"))
      .def("put", &Watch::put, py::arg("key"), py::arg("value"))
      .def(
          "spend",
          [](Watch& self, double seconds) {
            self.spend(std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)));
          },
          py::arg("seconds"))
      .def("cost", &Watch::cost)
      .def("broken", &Watch::broken);
}
