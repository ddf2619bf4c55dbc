#include <tenure/offload/promise.h>

#include <tenure/core/fork.h>
#include <tenure/core/part.h>

#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace tenure::offload {
namespace {

struct Promises {
  std::mutex mutex;
  std::multiset<uint64_t> budgets;
  std::set<std::shared_ptr<const Promise::Displaced>> displaced;
  PartRegistration registration;

  Promises() {
    protect_across_fork(mutex);
    registration = register_part(
        {.name = "offload",
         .stats =
             [this] {
               return std::vector<std::pair<std::string, int64_t>>{{"bound_bytes", tightest()}};
             },
         .displaced = [this](const c10::Device& device) { return displaced_on(device); }});
  }

  // 0: nobody has promised anything.
  int64_t tightest() {
    const std::lock_guard lock(mutex);
    return budgets.empty() ? 0 : static_cast<int64_t>(*budgets.begin());
  }

  // Sessions are asked without the lock: they have their own.
  int64_t displaced_on(const c10::Device& device) {
    std::vector<std::shared_ptr<const Promise::Displaced>> asked;
    {
      const std::lock_guard lock(mutex);
      asked.assign(displaced.begin(), displaced.end());
    }
    int64_t out = 0;
    for (const auto& one : asked) {
      out += (*one)(device);
    }
    return out;
  }
};

Promises& promises() {
  static auto* all = new Promises;
  return *all;
}

}  // namespace

Promise::Promise(std::optional<uint64_t> budget, Displaced displaced)
    : budget_(budget), displaced_(std::make_shared<const Displaced>(std::move(displaced))) {
  const std::lock_guard lock(promises().mutex);
  if (budget_) {
    promises().budgets.insert(*budget_);
  }
  promises().displaced.insert(displaced_);
}

Promise::~Promise() {
  const std::lock_guard lock(promises().mutex);
  auto& budgets = promises().budgets;
  if (budget_) {
    budgets.erase(budgets.find(*budget_));
  }
  promises().displaced.erase(displaced_);
}

}  // namespace tenure::offload
