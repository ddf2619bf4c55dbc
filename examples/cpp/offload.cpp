// Trains a small net in C++ with its activations on the host, and checks that the gradients are
// those of a plain step, bit for bit. Uses the accelerator if there is one, else the CPU with
// copies to other memory of the CPU: the same machinery.
#include <tenure/offload/active.h>

#include <torch/torch.h>

#include <iostream>

namespace offload = tenure::offload;

namespace {

constexpr int kSteps = 30;

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(64, 256), torch::nn::GELU(),
                               torch::nn::Linear(256, 256), torch::nn::GELU(),
                               torch::nn::Linear(256, 1));
}

// The gradients of one step, all in one row.
torch::Tensor gradients(torch::nn::Sequential& net, const torch::Tensor& loss) {
  net->zero_grad();
  loss.backward();
  std::vector<torch::Tensor> all;
  for (const auto& parameter : net->parameters()) {
    all.push_back(parameter.grad().flatten());
  }
  return torch::cat(all);
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const auto device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  auto net = make_net();
  net->to(device);
  const auto input = torch::randn({512, 64}, device);
  const auto target = input.sin().sum(1, /*keepdim=*/true);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(3e-3));

  offload::Options options;
  options.target = device == torch::kCUDA ? offload::Target::host : offload::Target::copy;
  offload::Session session(options);
  std::vector<tenure::StorageRef> parameters;
  for (const auto& parameter : net->parameters()) {
    parameters.emplace_back(parameter);
  }
  session.never(std::move(parameters));

  const auto loss_of = [&] { return (net->forward(input) - target).square().mean(); };
  bool equal = true;
  double loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    const auto plain = gradients(net, loss_of());
    const offload::Active active(session);
    const auto now = loss_of();
    equal = equal && torch::equal(plain, gradients(net, now));
    optimizer.step();
    loss = now.item<double>();
  }
  std::cout << offload::stats_text(session.stats()) << "gradients "
            << (equal ? "equal" : "DIFFERENT") << ", loss " << loss << "\n";
  return equal && session.stats().moved_out.bytes > 0 ? 0 : 1;
}
