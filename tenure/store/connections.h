// Connections: the client's ways to its owners, and those that lie idle. Every error names the
// owner and where it is. Threading: any thread. Torch-free.
#pragma once

#include <tenure/store/hello.h>
#include <tenure/store/identity.h>
#include <tenure/store/incoming.h>
#include <tenure/store/messages.h>
#include <tenure/store/transport.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tenure::store {

// The way to an owner.
struct Route {
  std::shared_ptr<const Origin> origin;
  Wire wire = Wire::local;

  [[nodiscard]] uint64_t owner() const { return origin->owner.incarnation; }
};

// "trainer 3 at 10.0.0.7:4100", "trainer 3 on this host"
std::string route_text(const Route& route);

// What `failure` is, with the route in its text: of OwnerLost, StoreTimeout and AccessRefused;
// anything else as it is.
std::exception_ptr named(const Route& route, const std::exception_ptr& failure);

// A connection past its introduction, with what was read and not yet looked at.
struct Line {
  std::unique_ptr<Transport> transport;
  Incoming incoming{128 << 10};
  uint32_t lease_ms = 0;
  bool was_idle = false;  // the owner may have ended it meanwhile
};

class Connections {
 public:
  using Deadline = Transport::Deadline;

  Connections(Credentials who, Member self) : who_(std::move(who)), self_(std::move(self)) {}

  // An idle one if there is one, otherwise a new one.
  std::unique_ptr<Line> take(const Route& route, Deadline deadline);
  // REQUIRES: nothing is under way on it.
  void give_back(const Route& route, std::unique_ptr<Line> line);
  [[nodiscard]] bool has_idle(const Route& route) const;
  // Ends the idle ones: of an owner that is gone, or all.
  void forget(uint64_t owner);
  void forget_all();

  // Throws OwnerLost (gone, or started again), StoreTimeout, AccessRefused.
  [[nodiscard]] std::unique_ptr<Line> connect(const Route& route, Purpose purpose,
                                              Deadline deadline) const;
  // To whoever listens at a Unix socket.
  [[nodiscard]] std::unique_ptr<Line> connect(const std::string& socket, Deadline deadline) const;

 private:
  using Key = std::pair<uint64_t, Wire>;

  [[nodiscard]] std::unique_ptr<Transport> reach(const Route& route, Deadline deadline) const;
  Member introduce(Line& line, Purpose purpose, Deadline deadline) const;

  Credentials who_;
  Member self_;
  mutable std::mutex mutex_;
  std::map<Key, std::vector<std::unique_ptr<Line>>> idle_;
};

}  // namespace tenure::store
