#include "stranger.h"

#include "served.h"
#include <tenure/store/frame.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace tenure::store {

Stranger::Stranger(const Origin& to, Wire wire) {
  prepare(wire);
  connect(to);
}

void Stranger::prepare(Wire wire) {
  wire_ = wire;
  socket_ =
      Socket(::socket(wire == Wire::local ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

void Stranger::connect(const Origin& to) {
  sockaddr_un local{};
  sockaddr_in tcp{};
  local.sun_family = AF_UNIX;
  to.path.copy(local.sun_path, sizeof(local.sun_path) - 1);
  tcp.sin_family = AF_INET;
  tcp.sin_port = htons(to.port);
  inet_pton(AF_INET, to.address.c_str(), &tcp.sin_addr);
  const auto* address = wire_ == Wire::local ? reinterpret_cast<const sockaddr*>(&local)
                                             : reinterpret_cast<const sockaddr*>(&tcp);
  const socklen_t length = wire_ == Wire::local ? sizeof(local) : sizeof(tcp);
  if (::connect(socket_.get(), address, length) != 0) {
    throw std::runtime_error(errno_text(errno));
  }
}

void Stranger::say(std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    pollfd writable{socket_.get(), POLLOUT, 0};
    ::poll(&writable, 1, 1000);
    const ssize_t sent =
        ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent <= 0) {
      return;
    }
    bytes = bytes.subspan(static_cast<size_t>(sent));
  }
}

std::vector<std::byte> Stranger::hear(size_t bytes, int ms) const {
  std::vector<std::byte> heard(bytes);
  size_t count = 0;
  while (count < bytes) {
    pollfd readable{socket_.get(), POLLIN, 0};
    if (::poll(&readable, 1, ms) <= 0) {
      break;
    }
    const ssize_t got = ::recv(socket_.get(), heard.data() + count, bytes - count, 0);
    if (got <= 0) {
      break;
    }
    count += static_cast<size_t>(got);
  }
  heard.resize(count);
  return heard;
}

bool Stranger::is_ended(int ms) const {
  const auto end = within(ms);
  std::array<std::byte, 4096> thrown_away;
  while (std::chrono::steady_clock::now() < end) {
    const Moved moved = receive_bytes(socket_.get(), thrown_away);
    if (moved.move == Move::ended) {
      return true;
    }
    pollfd readable{socket_.get(), POLLIN, 0};
    ::poll(&readable, 1, 1);
  }
  return false;
}

Hello Stranger::hello() const {
  Hello hello;
  hello.wire = wire_;
  hello.job = job_digest(kJob);
  if (wire_ != Wire::local) {
    hello.nonce = new_nonce();
  }
  return hello;
}

Answer Stranger::hear_answer() const {
  const auto heard = hear(kAnswerBytes);
  if (heard.size() < kAnswerBytes) {
    throw std::runtime_error("no answer");
  }
  return decode_answer(std::span(heard).first<kAnswerBytes>()).value();
}

void Stranger::shake_hands() const {
  const Hello self = hello();
  say(encode(self));
  const Answer answer = hear_answer();
  if (answer.verdict != Verdict::welcome) {
    throw std::runtime_error("not welcome");
  }
  if (wire_ != Wire::local) {
    say(proof_of(kSecret, Side::client, self, answer.nonce));
  }
}

void Stranger::introduce(Purpose purpose) const {
  say(frame(MessageKind::introduce,
            encode(Introduce{.job = kJob, .member = trainer(7, 77), .purpose = purpose})));
  const auto heard = hear(kHeaderBytes);
  const auto header = decode_header(std::span(heard).first<kHeaderBytes>()).value();
  static_cast<void>(hear(header.body_bytes));
}

}  // namespace tenure::store
