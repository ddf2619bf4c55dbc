#include <tenure/store/requesting.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/errors.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <ranges>

namespace tenure::store {

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
  all_.push_back(std::make_unique<Requesting>(std::move(route), answered_by));
  return *all_.back();
}

void Requests::run() {
  // Those to whom there is a connection first, and then a fair share of the time for each: one that
  // cannot be reached does not use up that of the others.
  std::ranges::stable_partition(
      all_, [this](const auto& requesting) { return connections_.has_idle(requesting->route()); });
  std::vector<Exchange*> exchanges;
  std::vector<std::exception_ptr> failures(all_.size());
  for (size_t i = 0; i < all_.size(); ++i) {
    const auto now = std::chrono::steady_clock::now();
    const auto share = (deadline_ - now) / static_cast<int64_t>(all_.size() - i + 1);
    try {
      all_[i]->begin(connections_.take(all_[i]->route(), now + share));
    } catch (...) {
      failures[i] = std::current_exception();
    }
    exchanges.push_back(all_[i].get());
  }
  Round(connections_, deadline_).run(exchanges, failures);
  for (size_t i = 0; i < all_.size(); ++i) {
    if (!failures[i]) {
      connections_.give_back(all_[i]->route(), all_[i]->end());
      continue;
    }
    try {
      std::rethrow_exception(failures[i]);
    } catch (const Error& failure) {
      const bool gone = dynamic_cast<const OwnerLost*>(&failure) != nullptr;
      unreached_.push_back({.owner = all_[i]->route().origin->owner,
                            .why = failure.what(),
                            .how = gone ? Unreached::How::gone : Unreached::How::silent});
    }
  }
}

}  // namespace tenure::store
