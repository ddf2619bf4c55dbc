#include <tenure/config.h>

#if TENURE_HAVE_ASIO

#include <tenure/store/connection.h>
#include <tenure/store/listening.h>
#include <tenure/store/stream.h>

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <optional>
#include <utility>

namespace tenure::store {
namespace {

using std::chrono::milliseconds;

constexpr int kAcceptedInATurn = 32;
constexpr milliseconds kMomentToSpeak{10};
constexpr milliseconds kMomentToProve{250};
constexpr milliseconds kIdle{1'000};  // it may not have read the last answer's end
constexpr milliseconds kNoDescriptors{100};

void say_full(int descriptor) {
  Answer answer;
  answer.verdict = Verdict::full;
  send_bytes(descriptor, encode(answer));
}

}  // namespace

Listening::Listening(Serving& serving, Socket socket, Wire wire)
    : serving_(serving),
      socket_(std::move(socket)),
      wire_(wire),
      waiter_(serving.io, socket_.get()),
      pause_(serving.io) {}

Listening::~Listening() { stop(); }

void Listening::stop() {
  pause_.cancel();
  if (waiter_.is_open()) {
    waiter_.release();
  }
  socket_.close();
}

void Listening::wait() {
  waiter_.async_wait(asio::posix::stream_descriptor::wait_read,
                     [this](const asio::error_code& error) {
                       if (!error) {
                         accept_some();
                       }
                     });
}

void Listening::pause(milliseconds time) {
  pause_.expires_after(time);
  pause_.async_wait([this](const asio::error_code& error) {
    if (!error) {
      accept_some();
    }
  });
}

void Listening::accept_some() {
  for (int i = 0; i < kAcceptedInATurn; ++i) {
    if (!make_place()) {
      return;
    }
    const int accepted = ::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (accepted >= 0) {
      try {
        admit(Socket(accepted));
      } catch (const std::exception&) {
        // No memory for one more: as full as by any other limit.
        serving_.counters.refused_full.fetch_add(1, std::memory_order_relaxed);
      }
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // The socket stays readable: waiting on it would spin.
      if (!end_one(kNoDescriptors)) {
        return;
      }
    }
  }
  wait();
}

bool Listening::make_place() {
  if (serving_.strangers(wire_) >= serving_.options.most_strangers) {
    const auto stranger = serving_.first_to_go(wire_);
    return !stranger || end_stranger(*stranger, kMomentToProve);
  }
  const bool is_full = serving_.connections.size() >= serving_.options.most_connections;
  const bool some_may_go = serving_.first_to_go(std::nullopt) || serving_.longest_spare();
  return !is_full || !some_may_go || end_one(kMomentToProve);
}

bool Listening::end_one(milliseconds pause_for) {
  if (const auto stranger = serving_.first_to_go(std::nullopt)) {
    return end_stranger(*stranger, pause_for);
  }
  if (const auto spare = serving_.longest_spare()) {
    const auto moment = std::min(kIdle, milliseconds(serving_.options.stall_ms / 4));
    return end_for_another(*spare, moment, spare->moved(), pause_for);
  }
  pause(pause_for);
  return false;
}

bool Listening::end_stranger(Connection& stranger, milliseconds pause_for) {
  const auto moment = std::min(stranger.said_hello() ? kMomentToProve : kMomentToSpeak,
                               milliseconds(serving_.options.hello_ms / 4));
  const bool ended = end_for_another(stranger, moment, stranger.since(), pause_for);
  serving_.counters.refused_full.fetch_add(ended ? 1 : 0, std::memory_order_relaxed);
  return ended;
}

bool Listening::end_for_another(Connection& one, milliseconds moment,
                                std::chrono::steady_clock::time_point since,
                                milliseconds pause_for) {
  const auto past = std::chrono::steady_clock::now() - since;
  if (past < moment) {
    pause(std::min(pause_for, std::chrono::ceil<milliseconds>(moment - past)));
    return false;
  }
  one.end();
  return true;
}

void Listening::admit(Socket socket) {
  auto& counters = serving_.counters;
  counters.accepted.fetch_add(1, std::memory_order_relaxed);
  if (wire_ == Wire::local && !is_own_user(socket.get())) {
    counters.refused_user.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  const bool is_full = serving_.connections.size() >= serving_.options.most_connections;
  // Over TLS it can be told only when TLS has begun; as a stranger it makes place again.
  if (is_full && wire_ != Wire::tls) {
    counters.refused_full.fetch_add(1, std::memory_order_relaxed);
    return say_full(socket.get());
  }
  if (wire_ != Wire::local) {
    tune_tcp(socket.get(), serving_.options.stall_ms);
  }
  auto stream = wire_ == Wire::tls ? tls_stream(std::move(socket), *serving_.tls)
                                   : plain_stream(std::move(socket), wire_);
  const auto place = is_full ? Connection::Place::none : Connection::Place::taken;
  auto connection = std::make_shared<Connection>(serving_, std::move(stream), place);
  serving_.connections.emplace(connection.get(), connection);
  counters.connections.store(serving_.connections.size(), std::memory_order_relaxed);
  connection->turn();
}

}  // namespace tenure::store

#endif
