#include <tenure/store/unconfirmed.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace tenure::store {
namespace {

constexpr size_t kMostDebts = 1024;
constexpr int kMostAttempts = 8;
constexpr std::chrono::milliseconds kAskAgain{1000};  // for all of them

}  // namespace

Unconfirmed::Unconfirmed(Client& client, std::chrono::milliseconds timeout)
    : client_(client), timeout_(timeout) {}

Client::Deadline Unconfirmed::deadline() const {
  return std::chrono::steady_clock::now() + timeout_;
}

void Unconfirmed::adopt(const ScopeName& scope, std::span<const Handle> handles) {
  const std::scoped_lock lock(mutex_);
  auto& adopted = adopted_[scope];
  std::ranges::copy_if(handles, std::back_inserter(adopted), &Handle::stored);
}

Client::CloseAnswer Unconfirmed::close(const ScopeName& scope) {
  std::vector<Handle> adopted;
  {
    const std::scoped_lock lock(mutex_);
    if (auto found = adopted_.extract(scope)) {
      adopted = std::move(found.mapped());
    }
  }
  Client::CloseAnswer answer;
  try {
    ask_again(answer);
    if (!adopted.empty()) {
      free(scope, adopted, answer);
    }
  } catch (...) {  // interrupted
    const std::scoped_lock lock(mutex_);
    std::ranges::move(adopted, std::back_inserter(adopted_[scope]));
    throw;
  }
  return answer;
}

void Unconfirmed::ask_again(Client::CloseAnswer& answer) {
  std::vector<Debt> due;
  {
    const std::scoped_lock lock(mutex_);
    due.swap(debts_);
  }
  const auto limit = std::chrono::steady_clock::now() + std::min(kAskAgain, timeout_);
  auto debt = due.begin();
  try {
    for (; debt != due.end(); ++debt) {
      auto unreached = debt->handles.empty()
                           ? client_.close(debt->scope, {&debt->origin, 1}, limit).unreached
                           : client_.free(debt->handles, limit).unreached;
      if (unreached.empty() || unreached.front().how != Unreached::How::silent) {
        continue;
      }
      ++debt->attempts;
      owe(std::move(*debt), std::move(unreached.front()), answer);
    }
  } catch (...) {  // interrupted
    const std::scoped_lock lock(mutex_);
    std::move(debt, due.end(), std::back_inserter(debts_));
    throw;
  }
}

void Unconfirmed::free(const ScopeName& scope, std::span<const Handle> handles,
                       Client::CloseAnswer& answer) {
  std::vector<std::shared_ptr<const Origin>> origins;
  std::vector<Handle> of_other_scopes;
  for (const auto& handle : handles) {
    if (handle.scope != scope) {
      of_other_scopes.push_back(handle);
    } else if (std::ranges::none_of(
                   origins, [&](const auto& origin) { return *origin == *handle.origin; })) {
      origins.push_back(handle.origin);
    }
  }
  auto closed = client_.close(scope, origins, deadline());
  answer.closed = std::move(closed.closed);
  for (auto& one : closed.unreached) {
    const auto origin =
        std::ranges::find_if(origins, [&](const auto& asked) { return asked->owner == one.owner; });
    owe({.scope = scope, .origin = *origin, .handles = {}}, std::move(one), answer);
  }
  for (auto& one : client_.free(of_other_scopes, deadline()).unreached) {
    std::vector<Handle> its;
    std::ranges::copy_if(of_other_scopes, std::back_inserter(its),
                         [&](const Handle& handle) { return handle.origin->owner == one.owner; });
    owe({.scope = scope, .origin = its.front().origin, .handles = its}, std::move(one), answer);
  }
}

void Unconfirmed::owe(Debt debt, Unreached why, Client::CloseAnswer& answer) {
  if (why.how == Unreached::How::silent) {
    const std::scoped_lock lock(mutex_);
    const bool again = debt.attempts < kMostAttempts && debts_.size() < kMostDebts;
    why.why += again ? "; it is asked again when another scope closes" : "; it is not asked again";
    if (again) {
      debts_.push_back(std::move(debt));
    }
  }
  answer.unreached.push_back(std::move(why));
}

}  // namespace tenure::store
