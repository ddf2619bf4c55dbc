#include <tenure/shard/gradients.h>

#include <ATen/ops/empty.h>

#include <utility>

namespace tenure::shard {
namespace {

// Autograd may give two parameters gradients that are views of one storage.
bool is_ours_alone(const Alias& kept) {
  return kept.tensor().storage().use_count() == 2;  // the lease's and this tensor's
}

// A view would keep all of its storage. What is someone's beside, the parameter itself for one, may
// be gone or written to by the time that it is read.
bool is_all_and_alone(const at::Tensor& gradient) {
  return gradient.is_contiguous() && gradient.nbytes() == gradient.storage().nbytes() &&
         gradient.storage().use_count() == 1;
}

}  // namespace

at::Tensor Gradients::all(const Layout& layout) {
  if (!all_.defined()) {
    all_ = Alias(at::empty({static_cast<int64_t>(layout.size)}, options_), owner_);
  }
  auto all = all_.tensor();
  turn_.take(all.storage());
  return all;
}

// One parameter's, in one dimension. REQUIRES: it came, and has elements.
at::Tensor Gradients::one(const Layout& layout, size_t parameter) {
  const auto& kept = kept_[parameter];
  auto out =
      kept.defined() ? kept.tensor().view({-1}) : part(all_.tensor(), layout.parameters[parameter]);
  turn_.take(out.storage());
  return out;
}

void Gradients::begin(const Layout& layout, c10::TensorOptions options, OwnerId owner) {
  options_ = options;
  owner_ = owner;
  came_.resize(layout.parameters.size());
  kept_.resize(came_.size());
}

void Gradients::take(const Layout& layout, size_t parameter, const at::Tensor& gradient,
                     Memory memory, std::optional<c10::ScalarType> type, OwnerId owner) {
  if (came_.empty()) {
    begin(layout, gradient.options().dtype(type.value_or(gradient.scalar_type())), owner);
  }
  const bool came = came_.at(parameter);
  came_[parameter] = true;
  if (gradient.numel() == 0) {
    return;
  }
  auto& kept = kept_[parameter];
  // A copy in a smaller dtype is the smaller one.
  if (memory == Memory::given && !came && !all_.defined() && gradient.dtype() == options_.dtype()) {
    turn_.take(gradient.device());
    kept =
        Alias(is_all_and_alone(gradient) ? gradient : gradient.clone(at::MemoryFormat::Contiguous),
              owner);
    return;
  }
  if (kept.defined() && is_ours_alone(kept)) {
    one(layout, parameter).view(gradient.sizes()).add_(gradient);
    return;
  }
  const auto place = part(all(layout), layout.parameters[parameter]).view(gradient.sizes());
  if (kept.defined()) {
    place.copy_(one(layout, parameter).view(gradient.sizes()));
    kept = {};
  }
  if (came) {
    place.add_(gradient);
  } else {
    place.copy_(gradient);
  }
}

std::pair<at::Tensor, std::vector<bool>> Gradients::hand_over(const Layout& layout,
                                                              Gradients& before) {
  if (empty()) {
    begin(layout, before.options_, before.owner_);
  }
  auto all = this->all(layout);
  for (size_t i = 0; i < kept_.size(); ++i) {
    if (kept_[i].defined()) {
      part(all, layout.parameters[i]).copy_(one(layout, i));
      kept_[i] = {};
    }
  }
  uint64_t filled = 0;
  for (size_t i = 0; i < came_.size(); ++i) {
    if (came_[i]) {
      part(all, {filled, layout.parameters[i].begin - filled}).zero_();
      filled = layout.parameters[i].end();
    }
  }
  part(all, {filled, layout.size - filled}).zero_();
  for (size_t i = 0; i < before.came_.size(); ++i) {
    if (!before.came_[i]) {
      continue;
    }
    came_[i] = true;
    if (layout.parameters[i].size != 0) {
      part(all, layout.parameters[i]).add_(before.one(layout, i));
    }
  }
  auto came = std::exchange(came_, {});
  drop();
  return {std::move(all), std::move(came)};
}

}  // namespace tenure::shard
