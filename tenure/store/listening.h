// Listening: a socket on which connections come in, with a limit on strangers. Too many of them do
// not keep others out: those that are here longest go first, once they had a moment to speak, and
// the next ones wait in the kernel until then. Those that said nothing go before those that said
// hello, after a shorter moment. Where no stranger had its moment, a member's connection that lies
// idle and can be spared goes. Where the process has had no descriptors left for a while, those
// that come are told so over one that is kept for this. On the server's thread. Torch-free; needs
// Asio.
#pragma once

#include <tenure/store/connection.h>
#include <tenure/store/hello.h>
#include <tenure/store/serving.h>
#include <tenure/store/socket.h>

#include <asio/posix/stream_descriptor.hpp>
#include <asio/steady_timer.hpp>

#include <chrono>
#include <memory>
#include <optional>

namespace tenure::store {

class Listening {
 public:
  Listening(Serving& serving, Socket socket, Wire wire);
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;
  Listening(Listening&&) = delete;
  Listening& operator=(Listening&&) = delete;
  ~Listening();

  void start() { wait(); }
  void stop();

 private:
  void wait();
  void pause(std::chrono::milliseconds time);
  void accept_some();
  bool make_place();
  // How long it may stay yet, if another needs its place.
  [[nodiscard]] std::chrono::milliseconds moment_left(const Connection& one) const;
  // Ends the first of them that is there and had its moment. If none had, goes on after `pause_for`
  // at most, and returns false.
  bool end_one(const std::shared_ptr<Connection>& stranger,
               const std::shared_ptr<Connection>& spare, std::chrono::milliseconds pause_for);
  void admit(Socket socket, Connection::Place place);
  // Whether there have been none for longer than it takes others to give some back.
  bool is_long_short();
  // Those that wait are let in over the descriptor that is kept, to be told why they cannot stay.
  void turn_away();

  Serving& serving_;
  Socket socket_;
  Wire wire_;
  asio::posix::stream_descriptor waiter_;
  asio::steady_timer pause_;
  Descriptor kept_;
  std::optional<std::chrono::steady_clock::time_point> short_since_;  // of descriptors
};

}  // namespace tenure::store
