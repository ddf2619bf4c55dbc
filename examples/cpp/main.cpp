// Trains a linear model with plain ATen under step scopes, and keeps one activation too long to
// show how Tenure names it.
#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>
#include <tenure/core/scope.h>
#include <tenure/core/text.h>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <iostream>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kSteps = 50;
constexpr int64_t kKeptStep = 12;
constexpr double kRate = 0.1;

void print_ledger(const char* when) {
  std::cout << when << ":\n";
  for (const auto& [owner, totals] : tenure::ledger().snapshot().by_owner()) {
    std::cout << "  " << tenure::owner_text(owner) << "  " << tenure::bytes_text(totals.bytes)
              << "\n";
  }
}

}  // namespace

int main() {
  at::manual_seed(0);
  const at::Tensor input = at::randn({256, 8});
  const at::Tensor truth = at::randn({8, 1});
  const at::Tensor target = input.mm(truth);
  at::Tensor weight = at::zeros({8, 1});

  const auto parameter = tenure::intern_owner(tenure::OwnerKind::parameter, "weight");
  const auto activation = tenure::intern_owner(tenure::OwnerKind::activation, "prediction");
  const tenure::Lease held_weight = tenure::hold(weight, parameter);
  std::vector<tenure::Lease> kept;

  double loss = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    tenure::Scope scope("step", step);
    const at::Tensor prediction = input.mm(weight);
    tenure::Lease lease = tenure::hold(prediction, activation);
    const at::Tensor error = prediction.sub(target);
    loss = error.square().mean().item<double>();
    weight.sub_(input.t().mm(error), 2 * kRate / static_cast<double>(input.size(0)));

    if (step == kSteps - 1) {
      print_ledger("in the last step");
    }
    if (step == kKeptStep) {
      kept.push_back(std::move(lease));  // the bug: it outlives its step
    }
    lease.release();
    const tenure::ScopeReport report = scope.close();
    if (!report.empty()) {
      std::cout << report.text() << "\n";
    }
  }
  std::cout << "loss " << loss << "\n";
  kept.clear();
  print_ledger("after training");
  return loss < 1e-3 ? 0 : 1;
}
