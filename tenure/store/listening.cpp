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
      if (!end_for_another(serving_.first_to_go(std::nullopt), kNoDescriptors)) {
        return;
      }
    }
  }
  wait();
}

bool Listening::make_place() {
  const bool is_crowded = serving_.strangers(wire_) >= serving_.options.most_strangers;
  if (!is_crowded && serving_.connections.size() < serving_.options.most_connections) {
    return true;
  }
  const auto stranger = serving_.first_to_go(is_crowded ? std::optional(wire_) : std::nullopt);
  return !stranger || end_for_another(stranger, kMomentToProve);
}

bool Listening::end_for_another(const std::shared_ptr<Connection>& stranger,
                                milliseconds pause_for) {
  if (!stranger) {
    pause(pause_for);
    return false;
  }
  const auto moment = std::min(stranger->said_hello() ? kMomentToProve : kMomentToSpeak,
                               milliseconds(serving_.options.hello_ms / 4));
  const auto here = std::chrono::steady_clock::now() - stranger->since();
  if (here < moment) {
    pause(std::min(pause_for, std::chrono::ceil<milliseconds>(moment - here)));
    return false;
  }
  serving_.counters.refused_full.fetch_add(1, std::memory_order_relaxed);
  stranger->end();
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
