// Listening: a socket on which connections come in, with a limit on strangers. Too many of them do
// not keep others out: those that are here longest go first, once they had a moment to speak, and
// the next ones wait in the kernel until then. Those that said nothing go before those that said
// hello, after a shorter moment. Where there is no stranger, a member's connection that lies idle
// and can be spared goes. On the server's thread. Torch-free; needs Asio.
#pragma once

#include <tenure/store/hello.h>
#include <tenure/store/serving.h>
#include <tenure/store/socket.h>

#include <asio/posix/stream_descriptor.hpp>
#include <asio/steady_timer.hpp>

#include <chrono>
#include <memory>

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
  // Ends one of all, a stranger before others. If there is none, or it had no moment yet, goes on
  // after `pause_for` at most, and returns false.
  bool end_one(std::chrono::milliseconds pause_for);
  bool end_stranger(Connection& stranger, std::chrono::milliseconds pause_for);
  bool end_for_another(Connection& one, std::chrono::milliseconds moment,
                       std::chrono::steady_clock::time_point since,
                       std::chrono::milliseconds pause_for);
  void admit(Socket socket);

  Serving& serving_;
  Socket socket_;
  Wire wire_;
  asio::posix::stream_descriptor waiter_;
  asio::steady_timer pause_;
};

}  // namespace tenure::store
