// Trainer: jobs, and the loop with a listener that is Python's.
#include <tenure/train/trainer.h>

#include "bindings.h"
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/train/checkpoint.h>

#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace py = pybind11;
namespace train = tenure::train;

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

py::dict to_python(int64_t number, const train::RankReport& rank) {
  py::dict out;
  out["rank"] = number;
  out["stages"] = rank.stages;
  out["in_flight"] = rank.in_flight;
  out["in_flight_bound"] = rank.in_flight_bound;
  out["activations"] = rank.activations;
  out["activations_bound"] = rank.activations_bound;
  out["allocated"] = rank.allocated;
  out["peak"] = rank.peak;
  out["rss"] = rank.rss;
  out["fitted"] = rank.fitted;
  return out;
}

py::dict to_python(const train::StepReport& report, int64_t steps) {
  py::dict out;
  out["step"] = report.step;
  out["steps"] = steps;
  out["loss"] = report.loss;
  out["norm"] = report.norm;
  out["learning_rate"] = report.learning_rate;
  out["tokens"] = report.tokens;
  out["seconds"] = report.seconds;
  py::list ranks;
  for (size_t i = 0; i < report.ranks.size(); ++i) {
    ranks.append(to_python(static_cast<int64_t>(i), report.ranks[i]));
  }
  out["ranks"] = ranks;
  return out;
}

// An object with stepped(), evaluated(), sampled() and saved(). Lives while run() does, which holds
// the object.
class PythonListener final : public train::Listener {
 public:
  PythonListener(const py::object& listener, int64_t steps) : listener_(listener), steps_(steps) {}

  bool stepped(const train::StepReport& report) override {
    const py::gil_scoped_acquire gil;
    return listener_.attr("stepped")(to_python(report, steps_)).cast<bool>();
  }
  void evaluated(int64_t step, double loss) override {
    const py::gil_scoped_acquire gil;
    listener_.attr("evaluated")(step, loss);
  }
  void sampled(int64_t step, const std::vector<int64_t>& prompt,
               const std::vector<int64_t>& tokens) override {
    const py::gil_scoped_acquire gil;
    listener_.attr("sampled")(step, prompt, tokens);
  }
  void saved(int64_t step, const std::string& path) override {
    const py::gil_scoped_acquire gil;
    listener_.attr("saved")(step, path);
  }

 private:
  const py::object& listener_;
  int64_t steps_;
};

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

train::Zero zero_of(int64_t stage) {
  if (stage != 0 && stage != 3) {
    throw tenure::InputError(
        tenure::text("ZeRO is stage 0, nothing shared out, or 3, everything; not ", stage, "."));
  }
  return stage == 0 ? train::Zero::none : train::Zero::parameters;
}

void set_offload(train::Job& job, const std::string& what, std::optional<uint64_t> budget) {
  if (what != "none" && what != "all" && what != "budget") {
    throw tenure::InputError("offload is none, all, or budget with a number of bytes.");
  }
  job.offload = what != "none";
  job.offload_budget = what == "budget" ? budget : std::nullopt;
}

train::Job make_job(const train::ModelConfig& model, std::string data, const py::kwargs& rest) {
  train::Job job;
  job.model = model;
  job.data = std::move(data);
  auto left = py::dict(rest);
  const auto take = [&](const char* name, auto& into) {
    if (left.contains(name)) {
      into = left[name].cast<std::remove_reference_t<decltype(into)>>();
      left.attr("pop")(name);
    }
  };
  bool recompute = false;
  bool bf16 = false;
  int64_t zero = 0;
  auto timeout = std::chrono::duration<double>(job.timeout).count();
  std::string offload = "none";
  std::optional<uint64_t> budget;
  take("weights", job.weights);
  take("validation", job.validation);
  take("rows", job.rows);
  take("length", job.length);
  take("microbatches", job.microbatches);
  take("steps", job.learning_rate.steps);
  take("learning_rate", job.learning_rate.peak);
  take("least_learning_rate", job.learning_rate.least);
  take("warm_up", job.learning_rate.warm_up);
  take("beta1", job.optimizer.beta1);
  take("beta2", job.optimizer.beta2);
  take("eps", job.optimizer.eps);
  take("weight_decay", job.optimizer.weight_decay);
  take("clip", job.clip);
  take("seed", job.seed);
  take("pp", job.pp);
  take("vpp", job.vpp);
  take("dp", job.dp);
  take("schedule", job.pipeline);
  take("zero", zero);
  take("offload", offload);
  take("offload_budget", budget);
  take("fit", job.fit);
  take("recompute", recompute);
  take("device", job.device);
  take("bf16", bf16);
  take("evaluate_every", job.evaluate_every);
  take("evaluate_batches", job.evaluate_batches);
  take("sample_every", job.sample_every);
  take("sample_tokens", job.sample_tokens);
  take("prompt", job.prompt);
  take("checkpoints", job.checkpoints);
  take("save_every", job.save_every);
  take("keep", job.keep);
  take("resume", job.resume);
  take("strict", job.strict);
  take("timeout", timeout);
  if (!left.empty()) {
    throw py::type_error(
        tenure::text("a job has no '", py::str(left.begin()->first).cast<std::string>(), "'"));
  }
  job.zero = zero_of(zero);
  job.activations = recompute ? train::Activations::recomputed : train::Activations::stored;
  job.precision = bf16 ? train::Precision::bf16 : train::Precision::fp32;
  job.timeout = milliseconds(timeout);
  set_offload(job, offload, budget);
  return job;
}

std::unique_ptr<train::Trainer> make_trainer(const train::Job& job, Group up, Group down,
                                             Group side, Group data, Group data_side, Group world,
                                             c10::intrusive_ptr<c10d::Store> store) {
  return std::make_unique<train::Trainer>(
      job, train::TrainGroups{
               .pipe = {.up = std::move(up), .down = std::move(down), .side = std::move(side)},
               .data = {.group = std::move(data),
                        .side = std::move(data_side),
                        .store = std::move(store),
                        .timeout = job.timeout},
               .world = std::move(world)});
}

}  // namespace

void bind_trainer(py::module_& m) {
  py::class_<train::Job>(m, "TrainJob")
      .def(py::init(&make_job), py::arg("model"), py::arg("data"))
      .def_property_readonly("steps", &train::Job::steps)
      .def_property_readonly("ranks", &train::Job::ranks)
      .def(
          "check", [](const train::Job& self, int64_t ranks) { train::check(self, ranks); },
          py::arg("ranks"), NoGil());
  m.def("train_newest_checkpoint", &train::newest_checkpoint, py::arg("folder"), NoGil());
  py::class_<train::Trainer>(m, "Trainer")
      .def(py::init(&make_trainer), py::arg("job"), py::kw_only(), py::arg("pipe_up"),
           py::arg("pipe_down"), py::arg("pipe_side"), py::arg("data_group"), py::arg("data_side"),
           py::arg("world_side"), py::arg("store"), NoGil())
      .def(
          "run",
          [](train::Trainer& self, const py::object& listener) {
            PythonListener told(listener, self.steps());
            const py::gil_scoped_release no_gil;
            self.run(told);
          },
          py::arg("listener"))
      .def("weights", &train::Trainer::weights, NoGil())
      .def_property_readonly("begin_step", &train::Trainer::begin_step)
      .def_property_readonly("parameters", &train::Trainer::parameters);
}
