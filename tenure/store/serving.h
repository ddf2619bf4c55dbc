// Serving: what the connections of one server share: the table, the limits, who is there. On the
// server's thread alone, except for the counters. Torch-free; needs Asio.
#pragma once

#include <tenure/store/hello.h>
#include <tenure/store/identity.h>
#include <tenure/store/objects.h>
#include <tenure/store/server.h>

#include <asio/io_context.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace tenure::store {

class Connection;

struct Counters {
  std::atomic<uint64_t> connections{0};
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> refused_user{0};
  std::atomic<uint64_t> refused_secret{0};
  std::atomic<uint64_t> refused_version{0};
  std::atomic<uint64_t> refused_job{0};
  std::atomic<uint64_t> refused_full{0};
  std::atomic<uint64_t> dropped_protocol{0};
  std::atomic<uint64_t> dropped_slow{0};
  std::atomic<uint64_t> sent_bytes{0};

  [[nodiscard]] ServerStats read() const;
};

struct Serving {
  Serving(Objects& table, ServerOptions chosen);
  Serving(const Serving&) = delete;
  Serving& operator=(const Serving&) = delete;
  Serving(Serving&&) = delete;
  Serving& operator=(Serving&&) = delete;
  ~Serving();

  // A connection of this member came, or went. It is one consumer however many it has.
  ConsumerId enter(const Member& member);
  void leave(const Member& member);
  // Whether a member that came is here with another connection, too.
  [[nodiscard]] bool has_more(const Member& member) const;

  // Closes the scope in the table; the connections for notices are told on the server's thread.
  Account close(const ScopeName& scope, const Member& by);
  // What the table has withdrawn, likewise.
  void tell_withdrawn();

  // How many connections of this wire have not shown who they are.
  [[nodiscard]] size_t strangers(Wire wire) const;
  // The one that makes place for others: of those that said nothing, the one that is here longest;
  // then of the others. Null if there is none. No wire: of all.
  [[nodiscard]] std::shared_ptr<Connection> first_to_go(std::optional<Wire> wire) const;
  // Of those that can be spared, the one that lies idle longest. Null if there is none.
  [[nodiscard]] std::shared_ptr<Connection> longest_spare() const;

  // Ends what is past its time.
  void sweep();

  Objects& objects;
  ServerOptions options;
  Digest job{};
  const std::shared_ptr<const TlsContext> tls;  // shared by connections; null: plain TCP
  std::shared_ptr<const Origin> origin;
  Counters counters;
  asio::io_context io{1};
  std::unordered_map<Connection*, std::shared_ptr<Connection>> connections;

 private:
  void tell_all(std::vector<std::byte> notice);

  struct Present {
    ConsumerId consumer{};
    size_t connections = 0;
  };
  using MemberKey = std::tuple<std::string, int32_t, uint64_t>;
  std::map<MemberKey, Present> present_;
};

}  // namespace tenure::store
