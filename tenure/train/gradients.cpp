#include <tenure/train/gradients.h>

#include <tenure/core/text.h>
#include <tenure/shard/collectives.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

namespace tenure::train {
namespace {

constexpr int kTag = 0x7e0;  // no message of the channel is under way

// This rank's copies of the matrix.
std::vector<at::Tensor> copies_of(const Parameters& parameters) {
  std::vector<at::Tensor> out;
  for (const auto& entry : parameters.entries()) {
    if (entry.is_tied) {
      out.push_back(entry.value);
    }
  }
  return out;
}

at::Tensor exchanged(const at::Tensor& mine, const pipeline::Groups& pipe, int64_t other,
                     std::chrono::milliseconds timeout) {
  const auto own = pipe.side->getRank();
  const auto& out = other > own ? pipe.up : pipe.down;
  const auto& in = other > own ? pipe.down : pipe.up;
  std::vector<at::Tensor> sent{mine.contiguous()};
  std::vector<at::Tensor> received{at::empty_like(sent.front())};
  const auto peer = static_cast<int>(other);
  const auto words = [&] {
    return text("adding up the gradients of the tied embedding on ranks ", own, " and ", other);
  };
  // On NCCL the two directions are two groups, and each waits for its stream only.
  const shard::Pending sending([&] { return out->send(sent, peer, kTag); });
  const shard::Pending receiving([&] { return in->recv(received, peer, kTag); });
  receiving.wait(timeout, words);
  sending.wait(timeout, words);
  return received.front();
}

at::Tensor square_sum_over(c10d::ProcessGroup& group, const at::Tensor& norm,
                           std::chrono::milliseconds timeout) {
  std::vector<at::Tensor> all{norm.square()};
  shard::Pending([&] { return group.allreduce(all); }).wait(timeout, [] {
    return std::string("adding up the norms of gradients");
  });
  return all.front().sqrt();
}

}  // namespace

void add_tied(const Parameters& parameters, const pipeline::Groups& pipe, TiedRanks ranks,
              std::chrono::milliseconds timeout) {
  const at::NoGradGuard no_grad;
  const auto copies = copies_of(parameters);
  if (copies.size() == 2) {  // both stages are this rank's
    const auto sum = copies[0].grad() + copies[1].grad();
    copies[0].mutable_grad() = sum;
    copies[1].mutable_grad() = sum.clone();
  } else if (copies.size() == 1 && ranks.first != ranks.last) {
    const auto other = pipe.side->getRank() == ranks.first ? ranks.last : ranks.first;
    auto& gradient = copies[0].mutable_grad();
    gradient = gradient + exchanged(gradient, pipe, other, timeout);
  }
}

at::Tensor clip(const Parameters& parameters, const pipeline::Groups& pipe, const DataGroup& data,
                double most) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> counted;
  std::vector<at::Tensor> all;
  for (const auto& entry : parameters.entries()) {
    if (entry.value.grad().defined()) {
      all.push_back(entry.value.grad());
      if (!entry.is_copy) {
        counted.push_back(all.back());
      }
    }
  }
  const auto device = parameters.entries().front().value.device();
  auto norm = counted.empty() ? at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device))
                              : at::linalg_vector_norm(at::stack(at::_foreach_norm(counted, 2)));
  if (parameters.in_pieces() && data.group->getSize() > 1) {
    norm = square_sum_over(*data.group, norm, data.timeout);
  }
  if (pipe.up->getSize() > 1) {
    norm = square_sum_over(*pipe.up, norm, data.timeout);
  }
  if (most > 0 && !all.empty()) {
    constexpr double never_zero = 1e-6;  // torch's
    at::_foreach_mul_(all, (most / (norm + never_zero)).clamp_max(1.0));
  }
  return norm;
}

}  // namespace tenure::train
