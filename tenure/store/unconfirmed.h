// Unconfirmed: what other owners have yet to free: handles that were adopted into scopes here, and
// what was asked of owners that did not answer. Those are asked again whenever a scope closes,
// until they were asked too often or too many are waited for. Torch-free. Threading: any thread.
#pragma once

#include <tenure/store/client.h>
#include <tenure/store/handle.h>

#include <chrono>
#include <cstddef>
#include <map>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace tenure::store {

class Unconfirmed {
 public:
  // `client` outlives it; a close() may take `timeout`.
  Unconfirmed(Client& client, std::chrono::milliseconds timeout);

  // close() of this scope will have these freed, too.
  void adopt(const ScopeName& scope, std::span<const Handle> handles);

  struct Answer {
    std::vector<std::pair<Member, ClosedAnswer>> closed;  // this scope, at other owners
    std::vector<Unreached> unreached;
  };
  // Asks again for what was not confirmed, and has what the scope adopted freed. Each of
  // `unreached` says whether it is asked again. Interrupted: nothing is forgotten, and another
  // close() goes on.
  Answer close(const ScopeName& scope);

 private:
  struct Debt {
    Client::Withdrawal what;
    int attempts = 0;  // those for which there was time
  };

  // What closing the scope has to ask for.
  static std::vector<Debt> debts_of(const ScopeName& scope, std::span<const Handle> adopted);
  // Asks for all of them at once, and owes what was not confirmed. Interrupted: `debts` are as they
  // were.
  Answer settle(std::vector<Debt>& debts, Client::Deadline deadline);
  void owe(Debt debt, Unreached& why);

  Client& client_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::map<ScopeName, std::vector<Handle>> adopted_;
  std::vector<Debt> debts_;
};

}  // namespace tenure::store
