#include <tenure/config.h>

#if TENURE_HAVE_ASIO

#include <tenure/store/connection.h>
#include <tenure/store/listening.h>
#include <tenure/store/stream.h>

#include <fcntl.h>
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
constexpr milliseconds kShortage{1'000};  // it may be over soon

void say(int descriptor, Verdict verdict) {
  Answer answer;
  answer.verdict = verdict;
  send_bytes(descriptor, encode(answer));
}

Descriptor one_to_keep() { return Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace

Listening::Listening(Serving& serving, Socket socket, Wire wire)
    : serving_(serving),
      socket_(std::move(socket)),
      wire_(wire),
      waiter_(serving.io, socket_.get()),
      pause_(serving.io),
      kept_(one_to_keep()) {}

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
      short_since_.reset();
      try {
        admit(Socket(accepted), Connection::Place::taken);
      } catch (const std::exception&) {
        // No memory for one more: as full as by any other limit.
        serving_.counters.refused_full.fetch_add(1, std::memory_order_relaxed);
      }
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    }
    const bool is_short = errno == EMFILE || errno == ENFILE;
    if (is_short || errno == ENOBUFS || errno == ENOMEM) {
      const bool turns_away = is_short && is_long_short();
      // The socket stays readable: waiting on it would spin.
      if (!end_one(serving_.first_to_go(std::nullopt), serving_.longest_spare(), kNoDescriptors)) {
        return turns_away ? turn_away() : void();
      }
    }
  }
  wait();
}

bool Listening::make_place() {
  if (serving_.strangers(wire_) >= serving_.options.most_strangers) {
    const auto crowding = serving_.first_to_go(wire_);
    return !crowding || end_one(crowding, nullptr, kMomentToProve);
  }
  if (serving_.connections.size() < serving_.options.most_connections) {
    return true;
  }
  const auto stranger = serving_.first_to_go(std::nullopt);
  const auto spare = serving_.longest_spare();
  return (!stranger && !spare) || end_one(stranger, spare, kMomentToProve);
}

milliseconds Listening::moment_left(const Connection& one) const {
  auto moment = std::min(kIdle, milliseconds(serving_.options.stall_ms / 4));
  if (one.is_stranger()) {
    moment = std::min(one.said_hello() ? kMomentToProve : kMomentToSpeak,
                      milliseconds(serving_.options.hello_ms / 4));
  }
  const auto begin = one.is_stranger() ? one.since() : one.moved();
  return std::chrono::ceil<milliseconds>(moment - (std::chrono::steady_clock::now() - begin));
}

bool Listening::end_one(const std::shared_ptr<Connection>& stranger,
                        const std::shared_ptr<Connection>& spare, milliseconds pause_for) {
  for (const auto& one : {stranger, spare}) {
    if (!one) {
      continue;
    }
    const auto left = moment_left(*one);
    if (left.count() <= 0) {
      serving_.counters.refused_full.fetch_add(one == stranger ? 1 : 0, std::memory_order_relaxed);
      one->end();
      return true;
    }
    pause_for = std::min(pause_for, left);
  }
  pause(pause_for);
  return false;
}

bool Listening::is_long_short() {
  const auto now = std::chrono::steady_clock::now();
  if (!short_since_) {
    short_since_ = now;
  }
  return now - *short_since_ >= kShortage;
}

void Listening::turn_away() {
  for (int i = 0; i < kAcceptedInATurn; ++i) {
    if (!kept_.is_open()) {
      kept_ = one_to_keep();
    }
    kept_.close();
    const int accepted = ::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (accepted < 0) {
      break;
    }
    admit(Socket(accepted), Connection::Place::no_descriptors);
  }
  kept_ = one_to_keep();
}

void Listening::admit(Socket socket, Connection::Place place) {
  auto& counters = serving_.counters;
  counters.accepted.fetch_add(1, std::memory_order_relaxed);
  if (wire_ == Wire::local && !is_own_user(socket.get())) {
    counters.refused_user.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (place == Connection::Place::taken &&
      serving_.connections.size() >= serving_.options.most_connections) {
    place = Connection::Place::none;
  }
  // Over TLS it can be told only when TLS has begun; as a stranger it makes place again.
  if (place != Connection::Place::taken && wire_ != Wire::tls) {
    counters.refused_full.fetch_add(1, std::memory_order_relaxed);
    return say(socket.get(), Connection::verdict_of(place));
  }
  if (wire_ != Wire::local) {
    tune_tcp(socket.get(), serving_.options.stall_ms);
  }
  auto stream = wire_ == Wire::tls ? tls_stream(std::move(socket), *serving_.tls)
                                   : plain_stream(std::move(socket), wire_);
  auto connection = std::make_shared<Connection>(serving_, std::move(stream), place);
  serving_.connections.emplace(connection.get(), connection);
  counters.connections.store(serving_.connections.size(), std::memory_order_relaxed);
  connection->turn();
}

}  // namespace tenure::store

#endif
