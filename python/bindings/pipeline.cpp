// Pipeline: schedules, and the runtime with stages that are Python's.
#include <tenure/pipeline/pipeline.h>

#include "bindings.h"
#include <tenure/core/error.h>
#include <tenure/core/meter.h>
#include <tenure/core/text.h>
#include <tenure/pipeline/backward.h>
#include <tenure/pipeline/bound.h>
#include <tenure/pipeline/check.h>
#include <tenure/pipeline/csv.h>
#include <tenure/pipeline/messages.h>
#include <tenure/pipeline/timeline.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace py = pybind11;
namespace pipeline = tenure::pipeline;

namespace {

// Bytes of CPU tensors that are born while this lives, for tests and benchmarks.
class HostMeter {
 public:
  HostMeter() : meter_(c10::Device(c10::DeviceType::CPU)) {}
  std::tuple<int64_t, int64_t> read() {
    const auto now = meter_.read();
    return {now.current, now.peak};
  }

 private:
  tenure::HostCount counting_;  // before the meter, which is told by it
  tenure::Meter meter_;
};

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using MaybeTensors = std::vector<std::optional<at::Tensor>>;

// Python has None for a tensor that there is not.
MaybeTensors to_python(const std::vector<at::Tensor>& tensors) {
  MaybeTensors out;
  for (const auto& tensor : tensors) {
    out.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  }
  return out;
}

std::vector<at::Tensor> from_python(const MaybeTensors& tensors) {
  std::vector<at::Tensor> out;
  for (const auto& tensor : tensors) {
    out.push_back(tensor.value_or(at::Tensor()));
  }
  return out;
}

// An object with forward(microbatch, inputs) and parameters().
class PythonStage final : public pipeline::Stage {
 public:
  explicit PythonStage(py::object stage) : stage_(std::move(stage)) {}
  PythonStage(const PythonStage&) = delete;
  PythonStage& operator=(const PythonStage&) = delete;
  ~PythonStage() override {
    const py::gil_scoped_acquire gil;
    stage_ = py::object();
  }

  std::vector<at::Tensor> forward(uint32_t microbatch, std::vector<at::Tensor> inputs) override {
    const py::gil_scoped_acquire gil;
    auto given = py::cast(to_python(inputs));
    inputs.clear();
    return from_python(stage_.attr("forward")(microbatch, std::move(given)).cast<MaybeTensors>());
  }
  std::vector<at::Tensor> parameters() const override {
    const py::gil_scoped_acquire gil;
    return stage_.attr("parameters")().cast<std::vector<at::Tensor>>();
  }

 private:
  py::object stage_;
};

// Calls a function of Python's, on whichever thread, and lets go of it with the GIL.
pipeline::Loss loss_of(py::object function) {
  if (function.is_none()) {
    return {};
  }
  const std::shared_ptr<py::object> kept(new py::object(std::move(function)), [](py::object* one) {
    const py::gil_scoped_acquire gil;
    delete one;
  });
  return [kept](uint32_t microbatch, const std::vector<at::Tensor>& outputs) {
    const py::gil_scoped_acquire gil;
    return (*kept)(microbatch, to_python(outputs)).cast<at::Tensor>();
  };
}

// The engine has left an error of Python's with the interpreter; until somebody takes it from there
// no other Python code may run.
void translate() {
  try {
    throw;
  } catch (const python_error&) {
    const py::gil_scoped_acquire gil;
    if (PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch) it goes on as it is
  }
}

using Spans = std::vector<std::tuple<double, double>>;

// A conversion costs more than what it converts: only those that are asked for.
std::vector<Spans> spans_of(const pipeline::Timeline& timeline,
                            const std::vector<uint32_t>& ranks) {
  std::vector<Spans> out;
  for (const auto rank : ranks) {
    auto& row = out.emplace_back();
    for (const auto& span : timeline.spans.at(rank)) {
      row.emplace_back(span.begin, span.end);
    }
  }
  return out;
}

void require_rank(const pipeline::Schedule& schedule, uint32_t rank) {
  if (rank >= schedule.ranks()) {
    throw tenure::InputError(tenure::text("there is no rank ", rank, ": the schedule has ",
                                          tenure::count_text(schedule.ranks(), "rank")));
  }
}

void bind_schedule(py::module_& m) {
  using pipeline::Schedule;
  m.def("schedule_names", &pipeline::schedule_names);
  m.def("make_schedule", &pipeline::make_schedule, py::arg("name"), py::arg("ranks"),
        py::arg("microbatches"), py::arg("chunks"), NoGil());
  m.def("schedule_from_csv", &pipeline::from_csv, py::arg("csv"), py::arg("name"), NoGil());
  py::class_<Schedule>(m, "Schedule")
      .def_readonly("name", &Schedule::name)
      .def_readonly("microbatches", &Schedule::microbatches)
      .def_property_readonly("ranks", &Schedule::ranks)
      .def_property_readonly("stages", &Schedule::stages)
      .def_readonly("rank_of_stage", &Schedule::rank_of_stage)
      .def("stages_of", &Schedule::stages_of, py::arg("rank"))
      .def("actions",
           [](const Schedule& self, uint32_t rank) {
             std::vector<std::tuple<uint32_t, std::string, uint32_t>> out;
             for (const auto& action : self.actions.at(rank)) {
               out.emplace_back(action.stage, std::string(1, pipeline::letter_of(action.kind)),
                                action.microbatch);
             }
             return out;
           })
      .def(
          "check", [](const Schedule& self) { pipeline::check(self); }, NoGil())
      .def("csv", &pipeline::to_csv, NoGil())
      .def(
          "in_flight",
          [](const Schedule& self, uint32_t rank) {
            require_rank(self, rank);
            const auto most = pipeline::most_in_flight(self, rank);
            return std::tuple(most.whole, most.waiting);
          },
          py::arg("rank"))
      .def(
          "peak_bytes",
          [](const Schedule& self, uint32_t rank,
             const std::vector<std::tuple<int64_t, int64_t>>& bytes) {
            require_rank(self, rank);
            std::vector<pipeline::MicrobatchBytes> of;
            for (const auto& [whole, waiting] : bytes) {
              of.push_back({.whole = whole, .waiting = waiting});
            }
            return pipeline::peak_bytes(self, rank, of);
          },
          py::arg("rank"), py::arg("bytes"))
      .def("send_slots", &pipeline::least_send_slots, NoGil())
      .def(
          "timeline",
          [](const Schedule& self, double forward, double input_backward, double weight_backward,
             double message, const std::vector<uint32_t>& ranks) {
            const auto found = pipeline::timeline(self, {.forward = forward,
                                                         .input_backward = input_backward,
                                                         .weight_backward = weight_backward,
                                                         .message = message});
            std::vector<double> bubbles;
            for (uint32_t rank = 0; rank < self.ranks(); ++rank) {
              bubbles.push_back(found.bubble(rank));
            }
            return std::tuple(spans_of(found, ranks), bubbles, found.length);
          },
          py::arg("forward"), py::arg("input_backward"), py::arg("weight_backward"),
          py::arg("message"), py::arg("ranks"));
}

std::unique_ptr<pipeline::Pipeline> make_pipeline(const pipeline::Schedule& schedule,
                                                  const std::vector<py::object>& stages, Group up,
                                                  Group down, Group side, double timeout,
                                                  bool strict) {
  std::vector<std::unique_ptr<pipeline::Stage>> own;
  for (const auto& stage : stages) {
    own.push_back(std::make_unique<PythonStage>(stage));
  }
  pipeline::Options options;
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1e3));
  options.strict = strict ? pipeline::Strict::on : pipeline::Strict::off;
  return std::make_unique<pipeline::Pipeline>(
      schedule, std::move(own),
      pipeline::Groups{.up = std::move(up), .down = std::move(down), .side = std::move(side)},
      options);
}

pipeline::Pass pass_of(bool train) {
  return train ? pipeline::Pass::train : pipeline::Pass::forward;
}

}  // namespace

void bind_pipeline(py::module_& m) {
  pipeline::install_translator(&translate);
  bind_schedule(m);
  py::class_<HostMeter>(m, "HostMeter").def(py::init<>()).def("read", &HostMeter::read);
  py::class_<pipeline::Pipeline>(m, "PipelineRuntime")
      .def(py::init(&make_pipeline), py::arg("schedule"), py::arg("stages"), py::arg("up"),
           py::arg("down"), py::arg("side"), py::arg("timeout"), py::arg("strict"))
      .def(
          "step",
          [](pipeline::Pipeline& self, bool train, py::object function, std::vector<int64_t> batch,
             std::vector<int64_t> target, uint64_t shapes) {
            const auto loss = loss_of(std::move(function));
            const pipeline::Given given{
                .batch_rows = std::move(batch), .target_rows = std::move(target), .shapes = shapes};
            auto result = [&] {
              const py::gil_scoped_release no_gil;
              return self.step(pass_of(train), loss, given);
            }();
            std::vector<MaybeTensors> outputs;
            for (const auto& one : result.outputs) {
              outputs.push_back(to_python(one));
            }
            return std::tuple(result.loss.defined() ? std::optional(result.loss) : std::nullopt,
                              outputs);
          },
          py::arg("train"), py::arg("loss"), py::arg("batch_rows"), py::arg("target_rows"),
          py::arg("shapes"))
      .def(
          "refuse",
          [](pipeline::Pipeline& self, bool train, const std::string& why) {
            self.refuse(pass_of(train), why);
          },
          py::arg("train"), py::arg("why"), NoGil())
      .def_property_readonly("failed_in", &pipeline::Pipeline::failed_in)
      .def_property_readonly("rank", &pipeline::Pipeline::rank)
      .def("promise",
           [](const pipeline::Pipeline& self) {
             const auto promise = self.promise();
             py::dict out;
             out["in_flight"] = promise.in_flight.all();
             out["waiting"] = promise.in_flight.waiting;
             out["bytes"] = promise.bytes;
             std::vector<std::tuple<int64_t, int64_t>> of;
             for (const auto& one : promise.microbatch) {
               of.emplace_back(one.whole, one.waiting);
             }
             out["microbatch_bytes"] = of;
             out["receives"] = promise.receives;
             out["sends"] = promise.sends;
             return out;
           })
      .def("stats", [](const pipeline::Pipeline& self) {
        const auto stats = self.stats();
        py::dict out;
        out["steps"] = stats.steps;
        out["failed_steps"] = stats.failed_steps;
        out["in_flight"] = stats.most_in_flight.all();
        out["waiting"] = stats.most_in_flight.waiting;
        out["peak_bytes"] = stats.peak_bytes;
        out["highest_bytes"] = stats.highest_bytes;
        out["messages"] = stats.channel.messages;
        out["changed_messages"] = stats.channel.changed;
        out["sent_bytes"] = stats.channel.sent_bytes;
        out["waited_seconds"] = stats.channel.waited;
        out["receive_buffer_bytes"] = stats.channel.most_held_bytes;
        return out;
      });
}
