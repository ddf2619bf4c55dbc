// Unconfirmed: what other owners have yet to free: handles that were adopted into scopes here, and
// what was asked of owners that did not answer. Those are asked again whenever a scope closes,
// until they were asked too often or too many are waited for. Torch-free. Threading: any thread.
#pragma once

#include <tenure/store/client.h>
#include <tenure/store/handle.h>

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace tenure::store {

class Unconfirmed {
 public:
  // `client` outlives it; an owner has `timeout` to answer.
  Unconfirmed(Client& client, std::chrono::milliseconds timeout);

  // close() of this scope will have these freed, too.
  void adopt(const ScopeName& scope, std::span<const Handle> handles);

  // Asks again for what was not confirmed, and has what the scope adopted freed. Each of
  // `unreached` says whether it is asked again. Interrupted: nothing is forgotten, and another
  // close() goes on.
  Client::CloseAnswer close(const ScopeName& scope);

 private:
  // That an owner closed the scope, or freed these of other scopes.
  struct Debt {
    ScopeName scope;
    std::shared_ptr<const Origin> origin;
    std::vector<Handle> handles;  // empty: the scope
    int attempts = 1;
  };

  [[nodiscard]] Client::Deadline deadline() const;
  void ask_again(Client::CloseAnswer& answer);
  void free(const ScopeName& scope, std::span<const Handle> handles, Client::CloseAnswer& answer);
  void owe(Debt debt, Unreached why, Client::CloseAnswer& answer);

  Client& client_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::map<ScopeName, std::vector<Handle>> adopted_;
  std::vector<Debt> debts_;
};

}  // namespace tenure::store
