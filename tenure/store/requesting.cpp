#include <tenure/store/requesting.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/errors.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <map>
#include <ranges>
#include <utility>

namespace tenure::store {
namespace {

constexpr std::chrono::milliseconds kLeastShare{20};  // of the time, for one owner to take a call

}  // namespace

void Requesting::speak() {
  for (const auto& [kind, body] : requests_) {
    say(kind, body);
  }
}

std::byte* Requesting::hear(const Header& header, std::span<const std::byte> body) {
  if (header.kind != answered_by_ || finished()) {
    throw InputError(text(route_text(route()), " answered what it was not asked"));
  }
  answers_.emplace_back(body.begin(), body.end());
  return nullptr;
}

Requesting& Requests::add(Route route, MessageKind answered_by) {
  all_.push_back({std::make_unique<Requesting>(std::move(route), answered_by), std::nullopt});
  return *all_.back().requesting;
}

void Requests::run() {
  // Those to whom there is a connection first, and then a fair share of the time for each: one that
  // cannot be reached does not use up that of the others. Where that would be too little to answer
  // in, the last ones are not asked. A quarter is left for the answers, which come together.
  std::vector<Asked*> order;
  std::ranges::transform(all_, std::back_inserter(order), [](Asked& asked) { return &asked; });
  std::ranges::stable_partition(order, [this](const Asked* asked) {
    return connections_.has_idle(asked->requesting->route());
  });
  std::vector<Exchange*> exchanges;
  std::vector<std::exception_ptr> failures(order.size());
  std::map<uint64_t, std::exception_ptr> lost;  // by owner: asked for several things, tried once
  const auto whole = deadline_ - std::chrono::steady_clock::now();
  const auto connected_by = deadline_ - (whole / 4);
  const auto least = std::min<Transport::Deadline::duration>(kLeastShare, whole / 2);
  for (size_t i = 0; i < order.size(); ++i) {
    Requesting& requesting = *order[i]->requesting;
    exchanges.push_back(&requesting);
    const auto owner = requesting.route().owner();
    if (const auto found = lost.find(owner); found != lost.end()) {
      failures[i] = found->second;
      continue;
    }
    const auto now = std::chrono::steady_clock::now();
    const auto share =
        std::max(least, (connected_by - now) / static_cast<int64_t>(order.size() - i));
    if (now + share > connected_by) {
      auto why = text(route_text(requesting.route()), " was not asked: others took the time");
      failures[i] = std::make_exception_ptr(StoreTimeout(why));
      order[i]->unreached = {.owner = requesting.route().origin->owner,
                             .why = std::move(why),
                             .how = Unreached::How::unasked};
      continue;
    }
    try {
      requesting.begin(connections_.take(requesting.route(), now + share));
    } catch (const Error&) {
      failures[i] = std::current_exception();
      lost[owner] = failures[i];
    }
  }
  Round(connections_, deadline_).run(exchanges, failures);
  for (size_t i = 0; i < order.size(); ++i) {
    Requesting& requesting = *order[i]->requesting;
    if (!failures[i]) {
      connections_.give_back(requesting.route(), requesting.end());
      continue;
    }
    if (order[i]->unreached) {
      continue;
    }
    try {
      std::rethrow_exception(failures[i]);
    } catch (const Error& failure) {
      const bool gone = dynamic_cast<const OwnerLost*>(&failure) != nullptr;
      order[i]->unreached = {.owner = requesting.route().origin->owner,
                             .why = failure.what(),
                             .how = gone ? Unreached::How::gone : Unreached::How::silent};
    }
  }
}

}  // namespace tenure::store
