// Server: lets other processes fetch what an Objects has, over a Unix socket and, if told, TCP. One
// thread of its own, which never takes the GIL; limits on connections, on message sizes, on what is
// outstanding, and on the time in each state. Whoever breaks the protocol, or comes without the
// secret, is dropped and counted, and the rest goes on.
//
// Threading: all methods from any thread. Torch-free. Built with Asio; without it the constructor
// throws tenure::Error.
#pragma once

#include <tenure/store/hello.h>
#include <tenure/store/identity.h>
#include <tenure/store/objects.h>
#include <tenure/store/tls.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tenure::store {

struct ServerOptions {
  std::string job;
  Member self;
  std::string folder;  // where the Unix socket is made; exists, and is the user's alone
  // TCP: none listens. "127.0.0.1:0": loopback, a port of the system's choice. Needs a secret.
  std::optional<std::string> listen;
  std::string advertise;  // the address that handles carry; empty: the one listened on
  Secret secret;
  std::optional<TlsFiles> tls;  // then TCP is with TLS alone
  uint32_t most_connections = 1024;
  uint32_t most_strangers = 256;        // connections that have not shown who they are
  uint64_t most_outstanding = 4 << 20;  // bytes queued for one connection beside the one being sent
  uint64_t most_notices = 64 << 20;     // bytes of notices that wait for it beside those
  int64_t hello_ms = 5'000;             // to show who one is
  int64_t stall_ms = 30'000;            // for a byte to move in the middle of a message, either way
  int64_t lease_ms = 30'000;            // Limits::lease_ms of the objects: clients renew within it
};

struct ServerStats {
  uint64_t connections = 0;  // now
  uint64_t accepted = 0;
  uint64_t refused_user = 0;    // another user over the Unix socket
  uint64_t refused_secret = 0;  // a wrong proof
  uint64_t refused_version = 0;
  uint64_t refused_job = 0;
  uint64_t refused_full = 0;      // too many connections or strangers
  uint64_t dropped_protocol = 0;  // not a message of ours
  uint64_t dropped_slow = 0;      // past hello_ms or stall_ms
  uint64_t sent_bytes = 0;
};

class Server {
 public:
  // Listens when it returns. Throws InputError (an address that cannot be one, TCP without a
  // secret), tenure::Error (a port in use, a folder that is not there or not the user's alone).
  // `objects` outlives it.
  Server(Objects& objects, ServerOptions options);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  Server(Server&&) = delete;
  Server& operator=(Server&&) = delete;
  // Ends its connections and removes its socket.
  ~Server();

  // What handles carry.
  [[nodiscard]] std::shared_ptr<const Origin> origin() const;  // shared by every handle

  // Closes the scope in the table and tells every consumer that is connected.
  Account close(const ScopeName& scope, const Member& by);

  // Tells every consumer that is connected what the table's owner withdrew (begin_call(),
  // fail_call(), free()). What clients ask for is told anyway.
  void tell_withdrawn();

  [[nodiscard]] ServerStats stats() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The folder in which processes of a job find each other on a host: made if it is not there, for
// this user alone. Throws tenure::Error if somebody else has it.
std::string job_folder(const std::string& job);
// Writes the job's name into it, for who looks for jobs.
void name_folder(const std::string& folder, const std::string& job);
// Removes the sockets of processes that were killed.
void remove_dead_sockets(const std::string& folder);
// The Unix sockets in it, of servers that may or may not still be there.
std::vector<std::string> sockets_in(const std::string& folder);

}  // namespace tenure::store
