// Train: models, data and weights files, as tests and `tenure train` use them.
#include "bindings.h"
#include <tenure/core/error.h>
#include <tenure/train/adamw.h>
#include <tenure/train/batches.h>
#include <tenure/train/config.h>
#include <tenure/train/sample.h>
#include <tenure/train/saved_weights.h>
#include <tenure/train/split.h>
#include <tenure/train/stage.h>
#include <tenure/train/tokens.h>

#include <ATen/CPUGeneratorImpl.h>
#include <pybind11/stl.h>

namespace py = pybind11;
namespace train = tenure::train;

namespace {

template <class Value>
bool equal(const Value& one, const Value& other) {
  return one == other;
}

void bind_config(py::module_& m) {
  py::class_<train::RopeScaling>(m, "TrainRopeScaling")
      .def(py::init([](double factor, double low, double high, int64_t original_context) {
             return train::RopeScaling{factor, low, high, original_context};
           }),
           py::kw_only(), py::arg("factor"), py::arg("low"), py::arg("high"),
           py::arg("original_context"))
      .def_readonly("factor", &train::RopeScaling::factor)
      .def_readonly("low", &train::RopeScaling::low)
      .def_readonly("high", &train::RopeScaling::high)
      .def_readonly("original_context", &train::RopeScaling::original_context)
      .def("__eq__", &equal<train::RopeScaling>);
  py::class_<train::ModelConfig>(m, "TrainConfig")
      .def(py::init([](const std::string& kind, int64_t layers, int64_t heads, int64_t kv_heads,
                       int64_t width, int64_t hidden, int64_t vocab, int64_t context,
                       double norm_eps, bool tied, double rope_theta,
                       std::optional<train::RopeScaling> rope_scaling) {
             return train::ModelConfig{
                 train::kind_named(kind),
                 layers,
                 heads,
                 kv_heads,
                 width,
                 hidden,
                 vocab,
                 context,
                 norm_eps,
                 tied ? train::HeadKind::tied : train::HeadKind::untied,
                 rope_theta,
                 rope_scaling,
             };
           }),
           py::kw_only(), py::arg("kind"), py::arg("layers"), py::arg("heads"), py::arg("kv_heads"),
           py::arg("width"), py::arg("hidden"), py::arg("vocab"), py::arg("context"),
           py::arg("norm_eps") = 1e-5, py::arg("tied") = true, py::arg("rope_theta") = 500'000.0,
           py::arg("rope_scaling") = std::nullopt)
      .def_static(
          "named",
          [](const std::string& kind, const std::string& size) {
            return train::config_named(train::kind_named(kind), size);
          },
          py::arg("kind"), py::arg("size"))
      .def_static("read", &train::read_config, py::arg("path"))
      .def(
          "write",
          [](const train::ModelConfig& self, const std::string& path) {
            train::write_config(path, self);
          },
          py::arg("path"))
      .def_property_readonly(
          "kind", [](const train::ModelConfig& self) { return train::name_of(self.kind); })
      .def_property_readonly(
          "tied", [](const train::ModelConfig& self) { return self.head == train::HeadKind::tied; })
      .def_readonly("layers", &train::ModelConfig::layers)
      .def_readonly("heads", &train::ModelConfig::heads)
      .def_readonly("kv_heads", &train::ModelConfig::kv_heads)
      .def_readonly("width", &train::ModelConfig::width)
      .def_readonly("hidden", &train::ModelConfig::hidden)
      .def_readonly("vocab", &train::ModelConfig::vocab)
      .def_readonly("context", &train::ModelConfig::context)
      .def_readonly("norm_eps", &train::ModelConfig::norm_eps)
      .def_readonly("rope_theta", &train::ModelConfig::rope_theta)
      .def_readonly("rope_scaling", &train::ModelConfig::rope_scaling)
      .def("__eq__", &equal<train::ModelConfig>);
}

std::shared_ptr<train::Stage> make_stage(const train::ModelConfig& config,
                                         std::optional<std::pair<int64_t, int64_t>> layers,
                                         const at::Device& device, std::optional<uint64_t> seed) {
  const auto [first, last] = layers.value_or(std::pair<int64_t, int64_t>(0, config.layers));
  auto stage = std::make_shared<train::Stage>(config, train::LayerRange{first, last}, device);
  if (seed) {
    stage->initialize(*seed);
  }
  return stage;
}

std::vector<int64_t> sample_from(train::Stage& stage, const std::vector<int64_t>& prompt,
                                 int64_t count, double temperature, int64_t top_k, uint64_t seed) {
  const auto& config = stage.config();
  if (!stage.is_first() || !stage.is_last()) {
    throw tenure::InputError("only a whole model can be sampled from, and this is a stage of one.");
  }
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return train::sample([&](const at::Tensor& tokens) { return stage.forward(tokens); }, prompt,
                       {count, temperature, top_k, config.context}, generator,
                       stage.named_weights().front().second.device());
}

void bind_stage(py::module_& m) {
  // Held as torch::nn holds its modules.
  py::class_<train::Stage, std::shared_ptr<train::Stage>>(m, "TrainStage")
      .def(py::init(&make_stage), py::arg("config"), py::kw_only(),
           py::arg("layers") = std::nullopt, py::arg("device") = at::Device(at::kCPU),
           py::arg("seed") = std::nullopt, NoGil())
      .def("forward", &train::Stage::forward, py::arg("x"), NoGil())
      .def("__call__", &train::Stage::forward, py::arg("x"), NoGil())
      .def("named_weights", &train::Stage::named_weights)
      .def("tied_weight", &train::Stage::tied_weight)
      .def(
          "load",
          [](train::Stage& self, const std::string& path) {
            train::load_weights(self, train::SavedWeights(path));
          },
          py::arg("path"), NoGil())
      .def("sample", &sample_from, py::arg("prompt"), py::kw_only(), py::arg("count"),
           py::arg("temperature") = 1.0, py::arg("top_k") = 0, py::arg("seed") = 0, NoGil());
  m.def("train_loss", &train::loss, py::arg("logits"), py::arg("targets"), NoGil());
  m.def(
      "train_split_layers",
      [](int64_t layers, int64_t stages) {
        std::vector<std::pair<int64_t, int64_t>> out;
        for (const auto& range : train::split_layers(layers, stages)) {
          out.emplace_back(range.first, range.last);
        }
        return out;
      },
      py::arg("layers"), py::arg("stages"));
}

void bind_files(py::module_& m) {
  m.def(
      "train_read_safetensors",
      [](const std::string& path) {
        const train::SafetensorsFile file(path);
        std::map<std::string, at::Tensor> tensors;
        for (const auto& [name, entry] : file.entries()) {
          tensors.emplace(name, file.read(name));
        }
        return std::pair(std::move(tensors), file.metadata());
      },
      py::arg("path"), NoGil());
  m.def(
      "train_write_safetensors",
      [](const std::string& path, const train::Weights& weights, const train::Metadata& metadata) {
        train::write_safetensors(path, weights, metadata);
      },
      py::arg("path"), py::arg("weights"), py::arg("metadata"), NoGil());
}

void bind_data(py::module_& m) {
  py::class_<train::Tokens>(m, "TrainTokens")
      .def_static("open", &train::Tokens::open, py::arg("path"), py::arg("most_bytes") = UINT64_MAX,
                  NoGil())
      .def("__len__", &train::Tokens::size)
      .def(
          "read",
          [](const train::Tokens& self, uint64_t first, uint64_t count) {
            if (first > self.size() || count > self.size() - first) {
              throw py::index_error("beyond the last token");
            }
            std::vector<int64_t> out(count);
            self.read(first, out);
            return out;
          },
          py::arg("first"), py::arg("count"))
      .def("split", &train::Tokens::split, py::arg("fraction"));
  py::class_<train::Batches>(m, "TrainBatches")
      .def(py::init([](const train::Tokens& tokens, int64_t rows, int64_t length, int64_t rank,
                       int64_t ranks, uint64_t seed, int64_t vocab) {
             return train::Batches(tokens, {rows, length, rank, ranks, seed, vocab});
           }),
           py::arg("tokens"), py::kw_only(), py::arg("rows"), py::arg("length"),
           py::arg("rank") = 0, py::arg("ranks") = 1, py::arg("seed") = 0, py::arg("vocab") = 256)
      .def(
          "next",
          [](train::Batches& self) {
            auto batch = self.next();
            return std::pair(std::move(batch.tokens), std::move(batch.targets));
          },
          NoGil())
      .def("seek", &train::Batches::seek, py::arg("position"))
      .def_property_readonly("position", &train::Batches::position)
      .def_property_readonly("windows", &train::Batches::windows);
}

void bind_optimizer(py::module_& m) {
  py::class_<train::AdamW>(m, "TrainAdamW")
      .def(py::init([](const train::Weights& weights, double beta1, double beta2, double eps,
                       double weight_decay) {
             std::vector<train::AdamW::Parameter> parameters;
             for (const auto& [name, value] : weights) {
               parameters.push_back({name, value, train::decay_of(value)});
             }
             return train::AdamW(std::move(parameters), {beta1, beta2, eps, weight_decay});
           }),
           py::arg("weights"), py::kw_only(), py::arg("beta1") = 0.9, py::arg("beta2") = 0.95,
           py::arg("eps") = 1e-8, py::arg("weight_decay") = 0.1)
      .def("step", &train::AdamW::step, py::arg("learning_rate"), NoGil())
      .def("zero_grad", &train::AdamW::zero_grad)
      .def("state", &train::AdamW::state)
      .def("load_state", &train::AdamW::load_state, py::arg("state"));
}

}  // namespace

void bind_train(py::module_& m) {
  bind_config(m);
  bind_stage(m);
  bind_files(m);
  bind_data(m);
  bind_optimizer(m);
}
