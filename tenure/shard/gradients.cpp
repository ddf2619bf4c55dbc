#include <tenure/shard/gradients.h>

#include <ATen/ops/empty.h>

#include <utility>

namespace tenure::shard {

void Gradients::take(const Layout& layout, size_t parameter, const at::Tensor& gradient,
                     std::optional<c10::ScalarType> type, OwnerId owner) {
  if (came_.empty()) {
    const auto options = gradient.options().dtype(type.value_or(gradient.scalar_type()));
    all_ = Alias(at::empty({static_cast<int64_t>(layout.size)}, options), owner);
    came_.resize(layout.parameters.size());
  }
  const auto& range = layout.parameters.at(parameter);
  const auto place = part(all_.tensor(), range).view(gradient.sizes());
  if (came_[parameter]) {
    place.add_(gradient);
  } else {
    place.copy_(gradient);
  }
  came_[parameter] = true;
}

std::pair<at::Tensor, std::vector<bool>> Gradients::hand_over(const Layout& layout) {
  auto all = all_.tensor();
  uint64_t filled = 0;
  for (size_t i = 0; i < came_.size(); ++i) {
    if (came_[i]) {
      part(all, {filled, layout.parameters[i].begin - filled}).zero_();
      filled = layout.parameters[i].end();
    }
  }
  part(all, {filled, layout.size - filled}).zero_();
  auto came = std::exchange(came_, {});
  drop();
  return {std::move(all), std::move(came)};
}

}  // namespace tenure::shard
