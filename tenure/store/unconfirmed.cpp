#include <tenure/store/unconfirmed.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace tenure::store {
namespace {

constexpr size_t kMostDebts = 1024;
constexpr int kMostAttempts = 8;
constexpr std::chrono::milliseconds kAskAgain{1000};  // for what was owed before, at most

}  // namespace

Unconfirmed::Unconfirmed(Client& client, std::chrono::milliseconds timeout)
    : client_(client), timeout_(timeout) {}

void Unconfirmed::adopt(const ScopeName& scope, std::span<const Handle> handles) {
  const std::scoped_lock lock(mutex_);
  auto& adopted = adopted_[scope];
  std::ranges::copy_if(handles, std::back_inserter(adopted), &Handle::stored);
}

Unconfirmed::Answer Unconfirmed::close(const ScopeName& scope) {
  std::vector<Handle> adopted;
  std::vector<Debt> due;
  {
    const std::scoped_lock lock(mutex_);
    if (auto found = adopted_.extract(scope)) {
      adopted = std::move(found.mapped());
    }
    due.swap(debts_);
  }
  // Those that were asked least come first: who does not answer comes to lie behind who was not
  // asked.
  std::ranges::stable_sort(due, {}, &Debt::attempts);
  const auto begun = std::chrono::steady_clock::now();
  Answer answer;
  try {
    answer.unreached = settle(due, begun + std::min(kAskAgain, timeout_ / 2)).unreached;
    auto debts = debts_of(scope, adopted);
    auto own = settle(debts, begun + timeout_);
    answer.closed = std::move(own.closed);
    std::ranges::move(own.unreached, std::back_inserter(answer.unreached));
  } catch (...) {  // interrupted
    const std::scoped_lock lock(mutex_);
    std::ranges::move(due, std::back_inserter(debts_));
    std::ranges::move(adopted, std::back_inserter(adopted_[scope]));
    throw;
  }
  return answer;
}

std::vector<Unconfirmed::Debt> Unconfirmed::debts_of(const ScopeName& scope,
                                                     std::span<const Handle> adopted) {
  std::vector<Handle> own;
  std::vector<Handle> others;
  for (const auto& handle : adopted) {
    (handle.scope == scope ? own : others).push_back(handle);
  }
  std::vector<Debt> debts;
  for (auto& withdrawal : by_owner(own)) {
    withdrawal.ids.clear();  // all of the scope
    debts.push_back({.what = std::move(withdrawal)});
  }
  for (auto& withdrawal : by_owner(others)) {
    debts.push_back({.what = std::move(withdrawal)});
  }
  return debts;
}

Unconfirmed::Answer Unconfirmed::settle(std::vector<Debt>& debts, Client::Deadline deadline) {
  std::vector<Client::Withdrawal> withdrawals;
  std::ranges::transform(debts, std::back_inserter(withdrawals), &Debt::what);
  auto withdrawn = client_.withdraw(withdrawals, deadline);
  Answer answer;
  for (size_t i = 0; i < debts.size(); ++i) {
    auto& [freed, closed, unreached] = withdrawn[i];
    if (closed) {
      answer.closed.emplace_back(withdrawals[i].origin->owner, std::move(*closed));
    }
    if (unreached) {
      owe(std::move(debts[i]), *unreached);
      answer.unreached.push_back(std::move(*unreached));
    }
  }
  debts.clear();
  return answer;
}

void Unconfirmed::owe(Debt debt, Unreached& why) {
  if (why.how != Unreached::How::silent && why.how != Unreached::How::unasked) {
    return;
  }
  debt.attempts += why.how == Unreached::How::silent ? 1 : 0;
  const std::scoped_lock lock(mutex_);
  const bool again = debt.attempts < kMostAttempts && debts_.size() < kMostDebts;
  why.why += again ? "; it is asked again when another scope closes" : "; it is not asked again";
  if (again) {
    debts_.push_back(std::move(debt));
  }
}

}  // namespace tenure::store
