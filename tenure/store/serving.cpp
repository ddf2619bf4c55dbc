#include <tenure/config.h>

#if TENURE_HAVE_ASIO

#include <tenure/store/connection.h>
#include <tenure/store/frame.h>
#include <tenure/store/serving.h>

#include <asio/post.hpp>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

namespace tenure::store {

ServerStats Counters::read() const {
  const auto now = [](const std::atomic<uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  return {.connections = now(connections),
          .accepted = now(accepted),
          .refused_user = now(refused_user),
          .refused_secret = now(refused_secret),
          .refused_version = now(refused_version),
          .refused_job = now(refused_job),
          .refused_full = now(refused_full),
          .dropped_protocol = now(dropped_protocol),
          .dropped_slow = now(dropped_slow),
          .sent_bytes = now(sent_bytes)};
}

Serving::Serving(Objects& table, ServerOptions chosen)
    : objects(table),
      options(std::move(chosen)),
      job(job_digest(options.job)),
      tls(options.tls ? tls_context(*options.tls) : nullptr) {}

Serving::~Serving() = default;

ConsumerId Serving::enter(const Member& member) {
  auto& present = present_[{member.role, member.rank, member.incarnation}];
  if (present.connections == 0) {
    present.consumer = objects.admit(member);
  }
  ++present.connections;
  return present.consumer;
}

void Serving::leave(const Member& member) {
  const auto found = present_.find({member.role, member.rank, member.incarnation});
  if (found == present_.end() || --found->second.connections > 0) {
    return;
  }
  objects.parted(found->second.consumer);
  present_.erase(found);
}

bool Serving::has_more(const Member& member) const {
  const auto found = present_.find({member.role, member.rank, member.incarnation});
  return found != present_.end() && found->second.connections > 1;
}

Account Serving::close(const ScopeName& scope, const Member& by) {
  Account account = objects.close(scope, by);
  asio::post(io, [this, scope, by] {
    tell_all(frame(MessageKind::scope_closed, encode(ScopeClosed{scope, by, now_ms()})));
  });
  return account;
}

void Serving::tell_withdrawn() {
  asio::post(io, [this] {
    const auto gone = objects.take_withdrawn();
    for (std::span<const ObjectId> left(gone); !left.empty();) {
      const auto some = left.first(std::min(kMostWishes, left.size()));
      tell_all(frame(MessageKind::withdrawn, encode(Ids{.ids = {some.begin(), some.end()}})));
      left = left.subspan(some.size());
    }
  });
}

void Serving::tell_all(std::vector<std::byte> notice) {
  const auto shared = std::make_shared<const std::vector<std::byte>>(std::move(notice));
  std::vector<std::shared_ptr<Connection>> listeners;
  for (const auto& [address, connection] : connections) {
    if (connection->hears_notices()) {
      listeners.push_back(connection);
    }
  }
  for (const auto& listener : listeners) {
    listener->tell(shared);
  }
}

size_t Serving::strangers(Wire wire) const {
  return static_cast<size_t>(std::ranges::count_if(connections, [&](const auto& entry) {
    return entry.second->is_stranger() && entry.second->wire() == wire;
  }));
}

std::shared_ptr<Connection> Serving::first_to_go(std::optional<Wire> wire) const {
  const auto later = [](const Connection& one) { return std::pair(one.said_hello(), one.since()); };
  std::shared_ptr<Connection> first;
  for (const auto& [address, connection] : connections) {
    const bool may = connection->is_stranger() && (!wire || connection->wire() == *wire);
    if (may && (!first || later(*connection) < later(*first))) {
      first = connection;
    }
  }
  return first;
}

std::shared_ptr<Connection> Serving::longest_spare() const {
  std::shared_ptr<Connection> longest;
  for (const auto& [address, connection] : connections) {
    if (connection->is_spare() && (!longest || connection->moved() < longest->moved())) {
      longest = connection;
    }
  }
  return longest;
}

void Serving::sweep() {
  const auto now = std::chrono::steady_clock::now();
  std::vector<std::shared_ptr<Connection>> late;
  for (const auto& [address, connection] : connections) {
    if (connection->is_late(now)) {
      late.push_back(connection);
    }
  }
  for (const auto& connection : late) {
    counters.dropped_slow.fetch_add(1, std::memory_order_relaxed);
    connection->end();
  }
}

}  // namespace tenure::store

#endif
