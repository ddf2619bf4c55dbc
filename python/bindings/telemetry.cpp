// Telemetry: the monitor, and the words that ranks exchange.
#include "telemetry.h"

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/telemetry/monitor.h>
#include <tenure/telemetry/ring.h>

#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

namespace py = pybind11;
namespace telemetry = tenure::telemetry;

namespace {

py::str name_of(size_t key) {
  const auto name = telemetry::keys()[key % telemetry::kKeys].name;
  return {name.data(), name.size()};
}

// Keys beyond those that there are repeat them, for measures of a larger layout.
std::vector<telemetry::Key> keys_of(size_t count) {
  std::vector<telemetry::Key> out;
  for (size_t key = 0; key < count; ++key) {
    out.push_back(telemetry::keys()[key % telemetry::kKeys]);
  }
  return out;
}

std::vector<int64_t> figures_of(const telemetry::Row& row, size_t count) {
  std::vector<int64_t> out;
  for (size_t key = 0; key < count; ++key) {
    out.push_back(row.figures[key % telemetry::kKeys]);
  }
  return out;
}

// By name, without what is absent.
py::dict figures_of(const telemetry::Row& row) {
  py::dict out;
  for (size_t key = 0; key < telemetry::kKeys; ++key) {
    if (const auto value = row.get(static_cast<telemetry::K>(key))) {
      out[name_of(key)] = *value;
    }
  }
  return out;
}

// For all ranks, then for each stage: (value, rank) by name.
py::list slots_of(const std::vector<std::optional<telemetry::Found>>& found,
                  size_t keys = telemetry::kKeys) {
  py::list out;
  py::dict slot;
  for (size_t i = 0; i < found.size(); ++i) {
    if (const auto& one = found[i]) {
      const auto key = i % keys;
      auto name = name_of(key);
      if (key >= telemetry::kKeys) {
        name = py::str(name.cast<std::string>() + "_" + std::to_string(key / telemetry::kKeys + 1));
      }
      slot[name] = py::make_tuple(one->value, one->rank);
    }
    if ((i + 1) % keys == 0) {
      out.append(slot);
      slot = py::dict();
    }
  }
  return out;
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(seconds));
}

void bind_told(py::module_& m) {
  using telemetry::Told;
  py::class_<Told>(m, "Told", "One interval, as a monitor knows it.")
      .def_readonly("number", &Told::number)
      .def_property_readonly("step", [](const Told& self) { return self.own.step; })
      .def_property_readonly(
          "time", [](const Told& self) { return static_cast<double>(self.own.when) * 1e-9; })
      .def_property_readonly("own", [](const Told& self) { return figures_of(self.own); })
      .def_property_readonly("slots", [](const Told& self) { return slots_of(self.found); })
      .def_readonly("peak_rank", &Told::peak_rank)
      .def_property_readonly(
          "peak_row",
          [](const Told& self) { return self.peak_row ? figures_of(*self.peak_row) : py::dict(); })
      .def_property_readonly("rows",
                             [](const Told& self) {
                               py::list out;
                               for (const auto& row : self.rows) {
                                 out.append(figures_of(row));
                               }
                               return out;
                             })
      .def_readonly("missed", &Told::missed)
      .def_readonly("lost", &Told::lost)
      .def_readonly("rowless", &Told::rowless);
}

std::function<void(const telemetry::Row&)> kept_in(telemetry::Ring* ring) {
  if (ring == nullptr) {
    return {};
  }
  return [ring](const telemetry::Row& row) { ring->append(row); };
}

std::unique_ptr<telemetry::Monitor> make_monitor(uint64_t every, uint64_t who, uint32_t rank,
                                                 uint32_t ranks, uint32_t stage, uint32_t stages,
                                                 bool reads, uint64_t rows_every, bool reads_rows,
                                                 std::vector<telemetry::Reduction::Group> groups,
                                                 size_t levels,
                                                 c10::intrusive_ptr<c10d::Store> store,
                                                 telemetry::Ring* ring, size_t most_due) {
  std::unique_ptr<telemetry::Reduction> reduction;
  std::unique_ptr<telemetry::Board> board;
  if (!groups.empty()) {
    reduction = std::make_unique<telemetry::Reduction>(std::move(groups), levels);
    if (store) {
      board = std::make_unique<telemetry::Board>(std::move(store), rank, ranks);
    }
  }
  return std::make_unique<telemetry::Monitor>(telemetry::MonitorOptions{.every = every,
                                                                        .who = who,
                                                                        .rank = rank,
                                                                        .ranks = ranks,
                                                                        .stage = stage,
                                                                        .stages = stages,
                                                                        .reads = reads,
                                                                        .rows_every = rows_every,
                                                                        .reads_rows = reads_rows,
                                                                        .most_due = most_due,
                                                                        .keep = kept_in(ring)},
                                              std::move(reduction), std::move(board));
}

void bind_monitor(py::module_& m) {
  using telemetry::Monitor;
  py::class_<Monitor>(m, "TelemetryMonitor", "What tenure.Monitor runs.")
      .def(py::init(&make_monitor), py::arg("every"), py::arg("who"), py::arg("rank"),
           py::arg("ranks"), py::arg("stage"), py::arg("stages"), py::arg("reads"),
           py::arg("rows_every"), py::arg("reads_rows"), py::arg("groups"), py::arg("levels"),
           py::arg("store"), py::arg("ring"),
           py::arg("most_due") = telemetry::MonitorOptions().most_due, py::keep_alive<1, 14>(),
           NoGil())
      .def("step", &Monitor::step, NoGil(), "A step has ended; True: an interval has, too.")
      .def(
          "next", [](Monitor& self, double seconds) { return self.next(milliseconds(seconds)); },
          py::arg("seconds"), NoGil(), "The next interval; None: not in that time.")
      .def_property_readonly("known", &Monitor::known,
                             "How many intervals next() had, has or will never have.")
      .def_property_readonly("over", &Monitor::over, "Whether next() has nothing to come.")
      .def(
          "recent",
          [](const Monitor& self) {
            py::list out;
            for (const auto& row : self.recent()) {
              auto figures = figures_of(row);
              figures["time"] = static_cast<double>(row.when) * 1e-9;
              out.append(figures);
            }
            return out;
          },
          "The newest rows of this rank, oldest first.")
      .def(
          "extremes",
          [](const Monitor& self) {
            py::dict out;
            const auto ranks = self.extremes();
            for (size_t i = 0; i < ranks.size(); ++i) {
              if (ranks[i]) {
                out[py::str(telemetry::keys()[i].name)] = *ranks[i];
              }
            }
            return out;
          },
          "By name, the rank whose figure is told, in the last interval that is known.")
      .def_property_readonly("collectives", &Monitor::collectives)
      .def_property_readonly("knows_peaks", &Monitor::knows_peaks)
      .def(
          "close", [](Monitor& self, double seconds) { self.close(milliseconds(seconds)); },
          py::arg("seconds"), NoGil());
}

}  // namespace

telemetry::Row row_of(const std::map<std::string, int64_t>& figures) {
  telemetry::Row out;
  for (const auto& [name, value] : figures) {
    const auto key = telemetry::key_named(name);
    if (!key) {
      throw tenure::InputError(tenure::text("there is no figure '", name, "'"));
    }
    out.set(*key, value);
  }
  return out;
}

void bind_telemetry(py::module_& m) {
  bind_told(m);
  bind_monitor(m);
  m.def(
      "telemetry_keys",
      [] {
        py::list out;
        for (const auto& key : telemetry::keys()) {
          out.append(
              py::make_tuple(std::string(key.name), std::string(telemetry::unit_name(key.unit)),
                             key.extreme == telemetry::Extreme::highest ? "highest" : "lowest",
                             key.is_signed, std::string(key.help)));
        }
        return out;
      },
      "(name, unit, which of all ranks' is told, signed, help) of each figure, in order.");
  m.def("telemetry_layout", &telemetry::layout_text, "What ranks must agree on.");
  m.attr("telemetry_most_members") = telemetry::kMostMembers;
  m.def(
      "telemetry_words",
      [](const std::map<std::string, int64_t>& figures, uint32_t rank, uint32_t stage,
         uint32_t stages, size_t keys) {
        std::vector<int64_t> words(telemetry::words_of(stages, keys));
        telemetry::write_words(keys_of(keys), figures_of(row_of(figures), keys), rank, stage,
                               words);
        return words;
      },
      py::arg("figures"), py::arg("rank"), py::arg("stage"), py::arg("stages"),
      py::arg("keys") = telemetry::kKeys,
      "What a rank with these figures says into the reduction, of so many keys.");
  m.def(
      "telemetry_slots",
      [](const std::vector<int64_t>& words, size_t keys) {
        return slots_of(telemetry::read_words(words, keys_of(keys)), keys);
      },
      py::arg("words"), py::arg("keys") = telemetry::kKeys,
      "What reduced words say: (value, rank) by name, of all and of each stage.");
}
