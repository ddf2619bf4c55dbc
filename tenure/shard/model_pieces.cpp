// What a model of C++ says of its pieces, and whole tensors from them.
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/shard/model_state.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cmath>

namespace tenure::shard {

std::vector<at::Tensor> Model::pieces() const { return state_->pieces; }

void Model::State::require_pieces() const {
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto& [unit, flat, index] = places[i];
    const auto& of = sharder->flat(unit, flat);
    if (!of.is_piece_of(index, pieces[i])) {
      throw InputError(text("the piece of '", of.names()[index],
                            "' has got another tensor (set_data()), which the model would not "
                            "compute with: write into the piece itself, with copy_()"));
    }
  }
}

double Model::gradient_norm() const {
  const at::NoGradGuard no_grad;
  auto sum = at::Tensor();
  for (const auto& piece : state_->pieces) {
    if (piece.grad().defined()) {
      const auto own = piece.grad().to(at::kDouble).square().sum();
      sum = sum.defined() ? sum + own : own;
    }
  }
  if (!sum.defined()) {
    return 0;
  }
  std::vector<at::Tensor> tensors{sum};
  Pending([&] { return state_->group->allreduce(tensors); }).wait(state_->timeout, [] {
    return std::string("adding up the norms of gradients");
  });
  return std::sqrt(sum.item<double>());
}

std::vector<std::string> Model::names() const {
  std::vector<std::string> out;
  for (const auto& [unit, flat, index] : state_->places) {
    out.push_back(state_->sharder->flat(unit, flat).names().at(index));
  }
  return out;
}

void Model::join(const std::vector<at::Tensor>& like_pieces, const Visit& visit) const {
  const auto& pieces = state_->pieces;
  const auto same = [](const at::Tensor& given, const at::Tensor& piece) {
    return given.defined() && given.sizes() == piece.sizes();
  };
  if (!std::ranges::equal(like_pieces, pieces, same)) {
    throw InputError("joining needs a tensor for each of pieces(), in its shape");
  }
  for (size_t begin = 0, end = 0; begin < pieces.size(); begin = end) {
    const auto& [unit, flat, first] = state_->places[begin];
    end = begin + state_->sharder->flat(unit, flat).names().size();
    const std::vector<at::Tensor> of(like_pieces.begin() + static_cast<std::ptrdiff_t>(begin),
                                     like_pieces.begin() + static_cast<std::ptrdiff_t>(end));
    const auto whole = state_->sharder->join(unit, flat, of);
    for (size_t i = begin; i < end; ++i) {
      visit(i, whole[i - begin]);
    }
  }
}

at::Tensor Model::piece_of(size_t index, const at::Tensor& whole) const {
  const auto& place = state_->places.at(index);
  return state_->sharder->flat(place.unit, place.flat).piece_from(place.index, whole);
}

}  // namespace tenure::shard
