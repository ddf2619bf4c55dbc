// Shard: the units of a model, for python/tenure/sharding, which knows modules and their hooks.
#include "bindings.h"
#include <tenure/core/error.h>
#include <tenure/shard/course.h>
#include <tenure/shard/ops.h>
#include <tenure/shard/sharder.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace py = pybind11;
namespace shard = tenure::shard;

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

shard::Phase phase_named(const std::string& name) {
  return name == "forward" ? shard::Phase::forward : shard::Phase::backward;
}

std::shared_ptr<shard::Sharder> make_sharder(
    const Group& group, const std::optional<Group>& replicas, const Group& side,
    const c10::intrusive_ptr<c10d::Store>& store, std::optional<at::ScalarType> gathered,
    std::optional<at::ScalarType> reduced, bool keep, bool on_host, uint32_t prefetch,
    std::optional<uint64_t> prefetch_bytes, double timeout) {
  shard::Options options;
  options.gathered = gathered;
  options.reduced = reduced;
  options.after_forward = keep ? shard::AfterForward::keep : shard::AfterForward::release;
  options.pieces = on_host ? shard::Pieces::on_host : shard::Pieces::on_device;
  options.prefetch = prefetch;
  options.prefetch_bytes = prefetch_bytes.value_or(options.prefetch_bytes);
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1e3));
  return std::make_shared<shard::Sharder>(shard::Collectives(group, replicas.value_or(Group())),
                                          shard::Agreement(side, store, options.timeout), options);
}

void bind_stats(py::module_& m) {
  py::class_<shard::UnitStats>(m, "ShardUnitStats")
      .def_readonly("name", &shard::UnitStats::name)
      .def_readonly("bytes", &shard::UnitStats::bytes)
      .def_readonly("gathers", &shard::UnitStats::gathers)
      .def_readonly("ahead", &shard::UnitStats::ahead)
      .def_readonly("reduces", &shard::UnitStats::reduces)
      .def_readonly("waited_seconds", &shard::UnitStats::waited)
      .def_readonly("moving_seconds", &shard::UnitStats::moving)
      .def_readonly("lag_seconds", &shard::UnitStats::lag);
  py::class_<shard::Stats>(m, "ShardStats")
      .def_readonly("passes", &shard::Stats::passes)
      .def_readonly("order_changes", &shard::Stats::order_changes)
      .def_readonly("piece_bytes", &shard::Stats::piece_bytes)
      .def_readonly("gathered_bytes", &shard::Stats::gathered_bytes)
      .def_readonly("peak_gathered_bytes", &shard::Stats::peak_gathered)
      .def_readonly("peak_needed_bytes", &shard::Stats::peak_needed)
      .def_readonly("moved_bytes", &shard::Stats::moved_bytes)
      .def_readonly("reduced_bytes", &shard::Stats::reduced_bytes)
      .def_readonly("units", &shard::Stats::units)
      .def_property_readonly("excess", &shard::Stats::excess)
      .def("__str__", &shard::stats_text);
}

void bind_course(py::module_& m) {
  py::class_<shard::Course>(m, "Course")
      .def(py::init())
      .def(
          "gradients",
          [](const shard::Course& self, const std::vector<at::Tensor>& leaves) {
            return self.gradients(leaves);
          },
          py::arg("leaves"));
  py::class_<shard::Stretch>(m, "Stretch")
      .def(py::init())
      .def("end", &shard::Stretch::end)
      .def("made", &shard::Stretch::made, py::arg("tensor"))
      .def("follow", &shard::Stretch::follow, py::arg("course"), py::arg("passed"))
      .def("forget", &shard::Stretch::forget);
}

}  // namespace

void bind_shard(py::module_& m) {
  bind_stats(m);
  bind_course(m);
  py::class_<shard::Reduced>(m, "Reduced")
      .def_readonly("unit", &shard::Reduced::unit)
      .def_readonly("flat", &shard::Reduced::flat)
      .def_readonly("mean", &shard::Reduced::mean)
      .def_readonly("came", &shard::Reduced::came);
  // Shared with operators of compiled graphs while they run.
  py::class_<shard::Sharder, std::shared_ptr<shard::Sharder>>(m, "Sharder")
      .def(py::init(&make_sharder), py::arg("group"), py::arg("replicas"), py::arg("side"),
           py::arg("store"), py::arg("gathered"), py::arg("reduced"), py::arg("keep"),
           py::arg("on_host"), py::arg("prefetch"), py::arg("prefetch_bytes"), py::arg("timeout"))
      .def(
          "add",
          [](shard::Sharder& self, const std::string& name,
             const std::vector<std::vector<std::string>>& names,
             const std::vector<std::vector<at::Tensor>>& values, bool stays) {
            return self.add(name, names, values,
                            stays ? shard::Stay::whole_pass : shard::Stay::while_used);
          },
          py::arg("name"), py::arg("names"), py::arg("values"), py::arg("stays"), NoGil())
      .def("count", &shard::Sharder::count)
      .def("keep_first", &shard::Sharder::keep_first, py::arg("count"), NoGil())
      .def(
          "parameters",
          [](shard::Sharder& self, uint32_t unit, uint32_t flat) {
            return self.flat(unit, flat).parameters();
          },
          py::arg("unit"), py::arg("flat"))
      .def(
          "pieces",
          [](shard::Sharder& self, uint32_t unit, uint32_t flat) {
            auto& of = self.flat(unit, flat);
            std::vector<at::Tensor> out;
            for (size_t i = 0; i < of.names().size(); ++i) {
              out.push_back(of.piece_of(i));
            }
            return out;
          },
          py::arg("unit"), py::arg("flat"))
      .def("begin_pass", &shard::Sharder::begin_pass, NoGil())
      .def("give_up_pass", &shard::Sharder::give_up_pass, NoGil())
      .def(
          "enter",
          [](shard::Sharder& self, uint32_t unit, const std::string& phase) {
            return self.enter(unit, phase_named(phase));
          },
          py::arg("unit"), py::arg("phase"), NoGil())
      .def("require_values", &shard::Sharder::require_values, py::arg("unit"), py::arg("values"))
      .def(
          "leave",
          [](shard::Sharder& self, uint32_t unit, const std::string& phase) {
            self.leave(unit, phase_named(phase));
          },
          py::arg("unit"), py::arg("phase"), NoGil())
      .def("hold", &shard::Sharder::hold, NoGil())
      .def("let_go", &shard::Sharder::let_go, NoGil())
      .def("drop_hold", &shard::Sharder::drop_hold, NoGil())
      .def("stuck", &shard::Sharder::stuck)
      .def("touch", &shard::Sharder::touch, py::arg("unit"), NoGil())
      .def(
          "take",
          [](shard::Sharder& self, uint32_t unit, uint32_t flat, size_t parameter,
             const at::Tensor& gradient) { self.take(unit, flat, parameter, gradient); },
          py::arg("unit"), py::arg("flat"), py::arg("parameter"), py::arg("gradient"), NoGil())
      .def("add_up", &shard::Sharder::add_up, py::arg("unit"), NoGil())
      .def("put_off_sums", &shard::Sharder::put_off_sums, py::arg("off"), NoGil())
      .def("drop_put_off", &shard::Sharder::drop_put_off, NoGil())
      .def("drop_gradients", &shard::Sharder::drop_gradients, NoGil())
      .def(
          "end_backward",
          [](shard::Sharder& self, bool outermost) {
            return self.end_backward(outermost ? shard::Backward::outermost
                                               : shard::Backward::inner);
          },
          py::arg("outermost"), NoGil())
      .def(
          "join",
          [](shard::Sharder& self, uint32_t unit, uint32_t flat,
             const std::vector<std::optional<at::Tensor>>& pieces) {
            std::vector<at::Tensor> given;
            for (const auto& piece : pieces) {
              given.push_back(piece.value_or(at::Tensor()));
            }
            const py::gil_scoped_release no_gil;
            return self.join(unit, flat, given);
          },
          py::arg("unit"), py::arg("flat"), py::arg("pieces"))
      .def("number", &shard::number_model)
      .def("stats", &shard::Sharder::stats);
}
