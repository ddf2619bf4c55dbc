// Notices: the client's thread and its second connection to each owner. It says what was fetched
// and unmapped (at once when idle, together when busy), renews the lease, hears which scopes
// closed, and comes back when the connection breaks. Threading: all methods from any thread, and
// none waits for an owner, except stop(). Torch-free.
#pragma once

#include <tenure/store/client.h>
#include <tenure/store/connections.h>
#include <tenure/store/socket.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tenure::store {

class Notices {
 public:
  struct Heard {
    std::function<void(const Member& owner, const ScopeName& scope)> scope_closed;
    std::function<void(const Member& owner)> owner_lost;
  };

  // `connections` outlives it.
  Notices(Connections& connections, Heard heard);
  Notices(const Notices&) = delete;
  Notices& operator=(const Notices&) = delete;
  Notices(Notices&&) = delete;
  Notices& operator=(Notices&&) = delete;
  ~Notices();

  // Whether this owner has a connection for notices, or had one that is being made again.
  [[nodiscard]] bool has(uint64_t owner) const;
  // Keeps this connection, introduced for notices. Starts the thread with the first.
  void keep(const Route& route, std::unique_ptr<Line> line);

  // Of an owner that is gone or unknown: nothing.
  void fetched(uint64_t owner, std::span<const ObjectId> ids);
  void unmapped(uint64_t owner, ObjectId id);

  // Says what is left to say, for as long as `patience`, and ends the thread. Later calls do
  // nothing.
  void stop(std::chrono::milliseconds patience);

 private:
  using Time = std::chrono::steady_clock::time_point;

  // What others left for the thread, of one owner.
  struct Mail {
    Route route;
    std::unique_ptr<Line> line;
    std::vector<ObjectId> fetched;
    std::vector<ObjectId> unmapped;
  };
  // An owner, as the thread knows it.
  struct Owner {
    Route route;
    std::unique_ptr<Line> line;  // null: broken
    std::vector<ObjectId> fetched;
    std::vector<ObjectId> unmapped;
    std::vector<std::byte> outgoing;
    size_t sent = 0;
    std::chrono::milliseconds lease{0};
    Time renew_at;
    Time broke_at;
    Time retry_at;
    std::chrono::milliseconds pause{0};

    [[nodiscard]] bool has_mail() const {
      return sent < outgoing.size() || !fetched.empty() || !unmapped.empty();
    }
  };

  void run();
  void sort_mail();
  void serve(Owner& owner, Time now);
  void write(Owner& owner, Time now);
  static void send(Owner& owner);
  void read(Owner& owner);
  void hear(const Owner& owner, std::span<const std::byte> body);
  void broke(Owner& owner, Time now);
  // False: it is gone.
  bool reconnect(Owner& owner, Time now);
  void lose(uint64_t id);
  [[nodiscard]] bool all_said() const;
  void wait();
  void wake();

  Connections& connections_;
  Heard heard_;
  Socket bell_;  // an eventfd

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Mail> mail_;
  std::unordered_set<uint64_t> known_;
  bool rung_ = false;
  bool stopped_ = false;
  Time stop_at_ = Time::max();

  std::unordered_map<uint64_t, Owner> owners_;  // the thread's own
  std::jthread thread_;
};

}  // namespace tenure::store
