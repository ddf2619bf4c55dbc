#include <tenure/offload/promise.h>

#include <tenure/core/fork.h>
#include <tenure/core/part.h>

#include <mutex>
#include <set>

namespace tenure::offload {
namespace {

struct Promises {
  std::mutex mutex;
  std::multiset<uint64_t> budgets;
  PartRegistration registration;

  Promises() {
    protect_across_fork(mutex);
    registration = register_part({.name = "offload", .stats = [this] {
                                    return std::vector<std::pair<std::string, int64_t>>{
                                        {"bound_bytes", tightest()}};
                                  }});
  }

  // 0: nobody has promised anything.
  int64_t tightest() {
    const std::lock_guard lock(mutex);
    return budgets.empty() ? 0 : static_cast<int64_t>(*budgets.begin());
  }
};

Promises& promises() {
  static auto* all = new Promises;
  return *all;
}

}  // namespace

Promise::Promise(uint64_t budget) : budget_(budget) {
  const std::lock_guard lock(promises().mutex);
  promises().budgets.insert(budget_);
}

Promise::~Promise() {
  const std::lock_guard lock(promises().mutex);
  auto& budgets = promises().budgets;
  budgets.erase(budgets.find(budget_));
}

}  // namespace tenure::offload
