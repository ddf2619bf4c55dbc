#include <tenure/shard/ops.h>

#include <tenure/core/error.h>
#include <tenure/core/part.h>
#include <tenure/core/text.h>
#include <tenure/core/torch_compat.h>
#include <tenure/shard/sharder.h>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tenure::shard {
namespace {

std::vector<std::pair<std::string, int64_t>> figures();

// The models of this process. A graph outlives the model that it was compiled for.
class Models {
 public:
  static Models& all() {
    static auto* models = new Models;
    return *models;
  }

  int64_t add(const std::shared_ptr<Sharder>& sharder) {
    const std::lock_guard lock(mutex_);
    // Leaked: whoever asks may ask late.
    static const auto* const registration =
        new PartRegistration(register_part({.name = "shard", .stats = figures}));
    (void)registration;
    std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
    known_.emplace(++last_, sharder);
    return last_;
  }

  std::vector<std::shared_ptr<Sharder>> living() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Sharder>> out;
    for (const auto& [number, sharder] : known_) {
      if (auto one = sharder.lock()) {
        out.push_back(std::move(one));
      }
    }
    return out;
  }

  std::shared_ptr<Sharder> at(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(number);
    auto sharder = found == known_.end() ? nullptr : found->second.lock();
    if (sharder == nullptr) {
      throw Error(text("a compiled graph runs for sharded model ", number,
                       ", which is gone: compile the model that is there"));
    }
    return sharder;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::weak_ptr<Sharder>> known_;
  int64_t last_ = 0;
};

// What recordings have of a step.
std::vector<std::pair<std::string, int64_t>> figures() {
  Stats sum;
  const auto models = Models::all().living();
  for (const auto& sharder : models) {
    if (const auto pass = sharder->pass()) {
      sum.gathered_bytes += pass->gathered_bytes;
      sum.peak_gathered += pass->peak_gathered;
      sum.peak_needed += pass->peak_needed;
      sum.moved_bytes += pass->moved_bytes;
      sum.reduced_bytes += pass->reduced_bytes;
      sum.waited += pass->waited;
      sum.lag += pass->lag;
    }
  }
  if (models.empty()) {
    return {};
  }
  const auto bytes = [](uint64_t count) { return static_cast<int64_t>(count); };
  const auto micros = [](double seconds) { return static_cast<int64_t>(seconds * 1e6); };
  return {{"gathered_bytes", bytes(sum.gathered_bytes)},
          {"peak_gathered_bytes", bytes(sum.peak_gathered)},
          {"peak_needed_bytes", bytes(sum.peak_needed)},
          {"moved_bytes", bytes(sum.moved_bytes)},
          {"reduced_bytes", bytes(sum.reduced_bytes)},
          {"waited_us", micros(sum.waited)},
          {"release_lag_us", micros(sum.lag)}};
}

Phase phase() { return compat::in_backward() ? Phase::backward : Phase::forward; }

void gather(at::TensorList /*parameters*/, int64_t model, int64_t unit) {
  Models::all().at(model)->gather(static_cast<uint32_t>(unit), phase());
}

void wait(at::TensorList /*parameters*/, int64_t model, int64_t unit) {
  Models::all().at(model)->use(static_cast<uint32_t>(unit), phase());
}

void release(at::TensorList /*parameters*/, int64_t model, int64_t unit) {
  Models::all().at(model)->leave(static_cast<uint32_t>(unit), phase());
}

void reduce(const at::Tensor& gradient, int64_t model, int64_t unit, int64_t flat,
            int64_t parameter, bool last) {
  const auto sharder = Models::all().at(model);
  const auto number = static_cast<uint32_t>(unit);
  // Compiled code may use the gradient's memory again for what comes next.
  sharder->take(number, static_cast<uint32_t>(flat), static_cast<size_t>(parameter), gradient,
                Memory::lent);
  if (last) {
    sharder->add_up(number);
  }
}

void nothing_to_units(at::TensorList /*parameters*/, int64_t /*model*/, int64_t /*unit*/) {}
void nothing_to_gradients(const at::Tensor& /*gradient*/, int64_t /*model*/, int64_t /*unit*/,
                          int64_t /*flat*/, int64_t /*parameter*/, bool /*last*/) {}

}  // namespace

int64_t number_model(const std::shared_ptr<Sharder>& sharder) { return Models::all().add(sharder); }

}  // namespace tenure::shard

TORCH_LIBRARY_FRAGMENT(tenure, m) {
  m.def("gather(Tensor(a!)[] parameters, int model, int unit) -> ()");
  m.def("wait(Tensor(a!)[] parameters, int model, int unit) -> ()");
  m.def("release(Tensor(a!)[] parameters, int model, int unit) -> ()");
  m.def(
      "reduce(Tensor(a!) gradient, int model, int unit, int flat, int parameter, bool last) -> ()");
}

TORCH_LIBRARY_IMPL(tenure, CompositeExplicitAutograd, m) {
  m.impl("gather", &tenure::shard::gather);
  m.impl("wait", &tenure::shard::wait);
  m.impl("release", &tenure::shard::release);
  m.impl("reduce", &tenure::shard::reduce);
}

TORCH_LIBRARY_IMPL(tenure, Meta, m) {
  m.impl("gather", &tenure::shard::nothing_to_units);
  m.impl("wait", &tenure::shard::nothing_to_units);
  m.impl("release", &tenure::shard::nothing_to_units);
  m.impl("reduce", &tenure::shard::nothing_to_gradients);
}
