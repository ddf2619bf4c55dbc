#include <tenure/store/client.h>

#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/text.h>
#include <tenure/store/connections.h>
#include <tenure/store/errors.h>
#include <tenure/store/exchange.h>
#include <tenure/store/fetching.h>
#include <tenure/store/notices.h>
#include <tenure/store/requesting.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

namespace tenure::store {
namespace {

constexpr std::chrono::milliseconds kLastWords{500};

ClientOptions checked(ClientOptions options) {
  check_job(options.job);
  check_member(options.self);
  return options;
}

[[noreturn]] void throw_refused(const Handle& handle, const Fetching::Refused& refused) {
  const std::string sentence = text(handle_text(handle), " cannot be fetched: ", refused.why);
  switch (refused.kind) {
    case RefusalKind::stale:
      throw StaleHandle(sentence);
    case RefusalKind::not_yours:
      throw AccessRefused(sentence);
    case RefusalKind::bad_input:
      throw InputError(sentence);
    case RefusalKind::budget:
      throw BudgetError(sentence);
    default:
      throw Error(sentence);
  }
}

void request(Requests& requests, const Route& route, const Client::Withdrawal& withdrawal) {
  const auto& ids = withdrawal.ids;
  if (ids.empty()) {
    check_scope(withdrawal.scope);
    requests.add(route, MessageKind::closed)
        .ask(MessageKind::close, encode(Close{withdrawal.scope}));
    return;
  }
  auto& requesting = requests.add(route, MessageKind::freed);
  for (size_t first = 0; first < ids.size(); first += kMostWishes) {
    const auto begin = ids.begin() + static_cast<ptrdiff_t>(first);
    const auto count = static_cast<ptrdiff_t>(std::min(kMostWishes, ids.size() - first));
    requesting.ask(MessageKind::free, encode(Ids{.ids = {begin, begin + count}}));
  }
}

}  // namespace

std::vector<Client::Withdrawal> by_owner(std::span<const Handle> handles) {
  std::vector<Client::Withdrawal> out;
  std::map<std::pair<uint64_t, std::string_view>, size_t> places;  // by incarnation and job
  for (const Handle& handle : handles) {
    if (!handle.origin) {
      throw InputError("a handle without an origin cannot be freed");
    }
    if (!handle.stored()) {
      continue;
    }
    const Origin& origin = *handle.origin;
    const auto [place, is_new] =
        places.try_emplace({origin.owner.incarnation, origin.job}, out.size());
    if (is_new) {
      out.push_back({.origin = handle.origin, .scope = handle.scope, .ids = {}});
    }
    out[place->second].ids.push_back(handle.id);
  }
  return out;
}

struct Client::State {
  explicit State(ClientOptions chosen)
      : options(checked(std::move(chosen))),
        connections({.job = options.job,
                     .secret = options.secret,
                     .tls = options.tls ? tls_context(*options.tls) : nullptr},
                    options.self),
        notices(connections, {.scope_closed = options.scope_closed,
                              .withdrawn = options.withdrawn,
                              .owner_lost = options.owner_lost}) {}

  void check_process() const;
  // None: it is of this job.
  [[nodiscard]] std::optional<std::string> foreign(const Origin& origin) const;
  void check(const Handle& handle) const;
  [[nodiscard]] Route route_to(const std::shared_ptr<const Origin>& origin, Over over) const;
  void hear_from(const Route& route, Deadline deadline);

  ClientOptions options;
  Host host = this_host();
  uint32_t generation = fork_generation();
  Connections connections;
  Notices notices;
};

void Client::State::check_process() const {
  if (generation != fork_generation()) {
    throw Error(
        "this process was forked from the one that joined the store, whose connections it cannot "
        "use; join the store in it");
  }
}

std::optional<std::string> Client::State::foreign(const Origin& origin) const {
  if (origin.job == options.job) {
    return std::nullopt;
  }
  return text("belongs to job ", origin.job, ", and this process to job ", options.job);
}

void Client::State::check(const Handle& handle) const {
  if (!handle.origin) {
    throw InputError("a handle without an origin cannot be used");
  }
  if (const auto why = foreign(*handle.origin)) {
    throw AccessRefused(text(handle_text(handle), ' ', *why));
  }
  if (!handle.stored()) {
    throw StaleHandle(text(handle_text(handle), " was never stored: ", handle.unstored));
  }
}

Route Client::State::route_to(const std::shared_ptr<const Origin>& origin, Over over) const {
  if (over == Over::best && !origin->path.empty() && origin->host == host) {
    return {origin, Wire::local};
  }
  if (origin->address.empty()) {
    throw OwnerLost(text(member_text(origin->owner), " cannot be reached from here: it listens on ",
                         "no TCP address; have it listen, which needs the job's secret"));
  }
  return {origin, Wire::tcp};
}

// Before the first fetch, so that no close of a scope can be missed after it.
void Client::State::hear_from(const Route& route, Deadline deadline) {
  if (!notices.has(route.owner())) {
    notices.keep(route, connections.connect(route, Purpose::notices, deadline));
  }
}

Client::Client(ClientOptions options) : state_(std::make_shared<State>(std::move(options))) {}

Client::~Client() {
  if (state_->generation != fork_generation()) {
    // The parent's: its thread is not here. What it used stays as it is.
    // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): without memory there is no going on
    static auto* const parents = new std::vector<std::shared_ptr<State>>();
    parents->push_back(state_);
    return;
  }
  state_->notices.stop(kLastWords);
  // Mappings may keep the rest alive.
  state_->connections.forget_all();
}

std::vector<Got> Client::get(std::span<const Want> wants, Deadline deadline,
                             const std::function<std::byte*(size_t want, uint64_t bytes)>& memory) {
  state_->check_process();
  std::vector<Got> gots(wants.size());
  const Fetching::Call call{
      .wants = wants,
      .gots = gots,
      .memory = memory,
      .unmapped = [state = state_](const Handle& handle) -> std::function<void(Heirs)> {
        return [state, owner = handle.origin->owner.incarnation, id = handle.id](Heirs heirs) {
          if (state->generation == fork_generation()) {
            state->notices.unmapped(owner, id, std::move(heirs));
          }
        };
      }};
  std::map<std::pair<uint64_t, Wire>, std::unique_ptr<Fetching>> by_owner;
  Fetching* last = nullptr;
  for (size_t i = 0; i < wants.size(); ++i) {
    const Want& want = wants[i];
    if (want.handle == nullptr) {
      throw InputError("a want without a handle cannot be fetched");
    }
    state_->check(*want.handle);
    const Route route = state_->route_to(want.handle->origin, want.over);
    if (last == nullptr || last->route().owner() != route.owner() ||
        last->route().wire != route.wire) {
      auto& fetching = by_owner[{route.owner(), route.wire}];
      if (!fetching) {
        fetching = std::make_unique<Fetching>(route, call);
      }
      last = fetching.get();
    }
    last->add(i);
  }
  std::vector<Exchange*> exchanges;
  for (const auto& [key, fetching] : by_owner) {
    state_->hear_from(fetching->route(), deadline);
    fetching->begin(state_->connections.take(fetching->route(), deadline));
    exchanges.push_back(fetching.get());
  }
  // One that has ended by itself was heard to its end, whatever became of the others: its owner is
  // not to take back what it lent, of which the mappings tell.
  const auto give_back = [&] {
    for (const auto& [key, fetching] : by_owner) {
      if (fetching->finished()) {
        state_->connections.give_back(fetching->route(), fetching->end());
      }
    }
  };
  try {
    Round(state_->connections, deadline).run(exchanges);
  } catch (...) {
    give_back();
    throw;
  }
  give_back();
  std::vector<Fetching::Refused> refused;
  for (const auto& [key, fetching] : by_owner) {
    refused.insert(refused.end(), fetching->refused().begin(), fetching->refused().end());
  }
  if (!refused.empty()) {
    const auto& first = *std::ranges::min_element(refused, {}, &Fetching::Refused::want);
    throw_refused(*wants[first.want].handle, first);
  }
  std::vector<Want> whole;
  std::ranges::copy_if(wants, std::back_inserter(whole), std::not_fn(&Want::more));
  fetched(whole);
  return gots;
}

void Client::fetched(std::span<const Want> wants) {
  std::map<uint64_t, std::vector<ObjectId>> told;
  for (const Want& want : wants) {
    told[want.handle->origin->owner.incarnation].push_back(want.handle->id);
  }
  for (const auto& [owner, ids] : told) {
    state_->notices.fetched(owner, ids);
  }
}

std::vector<Client::Withdrawn> Client::withdraw(std::span<const Withdrawal> withdrawals,
                                                Deadline deadline) {
  state_->check_process();
  std::vector<Withdrawn> out(withdrawals.size());
  Requests requests(state_->connections, deadline);
  std::vector<size_t> asked;  // which of them each request is
  for (size_t i = 0; i < withdrawals.size(); ++i) {
    const auto& origin = withdrawals[i].origin;
    if (auto why = state_->foreign(*origin)) {
      out[i].unreached = {
          .owner = origin->owner, .why = std::move(*why), .how = Unreached::How::foreign};
      continue;
    }
    try {
      request(requests, state_->route_to(origin, Over::best), withdrawals[i]);
      asked.push_back(i);
    } catch (const OwnerLost& lost) {
      out[i].unreached = {.owner = origin->owner, .why = lost.what()};
    }
  }
  requests.run();
  for (size_t request = 0; request < asked.size(); ++request) {
    Withdrawn& withdrawn = out[asked[request]];
    withdrawn.unreached = requests.unreached(request);
    for (const auto& body : requests.at(request).answers()) {
      if (withdrawals[asked[request]].ids.empty()) {
        withdrawn.closed = decode_closed(body);
        withdrawn.freed = withdrawn.closed->freed;
      } else {
        withdrawn.freed += decode_freed(body).count;
      }
    }
  }
  return out;
}

Client::FreeAnswer Client::free(std::span<const Handle> handles, Deadline deadline) {
  const auto withdrawals = by_owner(handles);
  FreeAnswer answer;
  for (auto& withdrawn : withdraw(withdrawals, deadline)) {
    answer.freed += withdrawn.freed;
    if (withdrawn.unreached) {
      answer.unreached.push_back(std::move(*withdrawn.unreached));
    }
  }
  return answer;
}

bool Client::same(const Handle& handle, const std::array<std::byte, 16>& fingerprint,
                  Deadline deadline) {
  state_->check_process();
  state_->check(handle);
  Requesting requesting(state_->route_to(handle.origin, Over::best), MessageKind::freed);
  requesting.ask(MessageKind::same, encode(Same{.id = handle.id, .fingerprint = fingerprint}));
  requesting.begin(state_->connections.take(requesting.route(), deadline));
  Exchange* const exchange = &requesting;
  Round(state_->connections, deadline).run({&exchange, 1});
  state_->connections.give_back(requesting.route(), requesting.end());
  return decode_freed(requesting.answers().front()).count == 1;
}

TextAnswer Client::ask(const std::string& socket, const Ask& question, Deadline deadline) {
  state_->check_process();
  // The owner is whoever is there: it has no incarnation that could be another.
  const auto origin = std::make_shared<const Origin>(Origin{.job = state_->options.job,
                                                            .owner = {},
                                                            .host = {},
                                                            .path = socket,
                                                            .address = {},
                                                            .port = 0});
  Requesting requesting({origin, Wire::local}, MessageKind::text);
  requesting.ask(MessageKind::ask, encode(question));
  requesting.begin(state_->connections.connect(socket, deadline));
  Exchange* const exchange = &requesting;
  Round(state_->connections, deadline).run({&exchange, 1});
  return decode_text(requesting.answers().front());
}

}  // namespace tenure::store
