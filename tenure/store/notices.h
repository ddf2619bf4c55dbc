// Notices: the client's thread and its second connection to each owner. It says what was fetched
// and unmapped (at once when idle, together when busy), renews the lease, hears which scopes
// closed, and comes back when the connection breaks: on a thread for each attempt, so that an owner
// that does not answer holds up no other. Threading: all methods from any thread, and none waits
// for an owner, except stop(). Torch-free.
#pragma once

#include <tenure/store/client.h>
#include <tenure/store/connections.h>
#include <tenure/store/heirs.h>
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
    std::function<void(const Member& owner, std::span<const ObjectId> ids)> withdrawn;
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
  // Told when these have let go of it, too.
  void unmapped(uint64_t owner, ObjectId id, Heirs heirs = {});

  // Says what is left to say, for as long as `patience`, and ends the thread; an attempt to come
  // back that is under way is waited for, a second at most. Later calls do nothing.
  void stop(std::chrono::milliseconds patience);

 private:
  using Time = std::chrono::steady_clock::time_point;

  // Unmapped here, and still mapped by those.
  struct Inherited {
    ObjectId id;
    Heirs heirs;
  };
  // What others left for the thread, of one owner.
  struct Mail {
    Route route;
    std::unique_ptr<Line> line;
    std::vector<ObjectId> fetched;
    std::vector<ObjectId> unmapped;
    std::vector<Inherited> inherited;
  };
  // An owner, as the thread knows it.
  struct Owner {
    Route route;
    std::unique_ptr<Line> line;  // null: broken
    std::vector<ObjectId> fetched;
    std::vector<ObjectId> unmapped;
    std::vector<Inherited> inherited;
    std::vector<std::byte> outgoing;
    size_t sent = 0;
    std::chrono::milliseconds lease{0};
    Time renew_at;
    Time broke_at;
    Time retry_at;
    bool is_returning = false;  // a thread tries
    std::chrono::milliseconds pause{0};

    [[nodiscard]] bool has_mail() const {
      return sent < outgoing.size() || !fetched.empty() || !unmapped.empty();
    }
  };

  void run();
  void sort_mail();
  static void ask_heirs(Owner& owner);
  void serve(Owner& owner, Time now);
  void write(Owner& owner, Time now);
  static void send(Owner& owner);
  void read(Owner& owner);
  void hear(const Owner& owner, MessageKind kind, std::span<const std::byte> body);
  void broke(Owner& owner, Time now);
  // What became of an attempt to connect again.
  struct Return {
    uint64_t owner = 0;
    std::unique_ptr<Line> line;  // null: it failed
    bool is_gone = false;
  };
  void begin_return(uint64_t id, Owner& owner, Time now);
  void try_return(uint64_t id, const Route& route);
  // False: the owner is gone.
  bool end_return(Owner& owner, Return& result);
  void retry_later(Owner& owner);
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
  std::vector<Return> returns_;
  bool rung_ = false;
  bool stopped_ = false;
  Time stop_at_ = Time::max();

  std::unordered_map<uint64_t, Owner> owners_;            // the thread's own
  std::unordered_map<uint64_t, std::jthread> returning_;  // the thread's own
  std::jthread thread_;
};

}  // namespace tenure::store
