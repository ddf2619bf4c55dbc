#include <tenure/store/transport.h>

#include <tenure/core/text.h>
#include <tenure/store/errors.h>
#include <tenure/store/resolving.h>
#include <tenure/store/socket.h>
#include <tenure/store/tls.h>
#include <tenure/store/waiting.h>

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace tenure::store {
namespace {

constexpr int64_t kVanishedMs = 20'000;
constexpr std::chrono::milliseconds kCrowded{5};  // until a full backlog is tried again
constexpr int kMostHellos = 3;

class SocketTransport final : public Transport {
 public:
  SocketTransport(Socket socket, Wire wire) : socket_(std::move(socket)), wire_(wire) {}

  size_t send_some(std::span<const std::byte> bytes) override {
    return moved(send_bytes(socket_.get(), bytes));
  }

  size_t receive_some(std::span<std::byte> into, int* descriptor) override {
    *descriptor = -1;
    if (wire_ == Wire::local) {
      return moved(receive_bytes(socket_.get(), into, descriptor));
    }
    return moved(receive_bytes(socket_.get(), into));
  }

  [[nodiscard]] int descriptor() const override { return socket_.get(); }
  [[nodiscard]] short awaited(bool sending) const override { return sending ? POLLOUT : POLLIN; }
  [[nodiscard]] Wire wire() const override { return wire_; }

 private:
  static size_t moved(const Moved& moved) {
    if (moved.move != Move::ended) {
      return moved.bytes;
    }
    if (moved.error == ETIMEDOUT) {
      throw StoreTimeout("nothing has come from there for too long");
    }
    throw OwnerLost(moved.error == 0
                        ? "the connection was ended from there"
                        : text("the connection broke (", errno_text(moved.error), ")"));
  }

  Socket socket_;
  Wire wire_;
};

class TlsTransport final : public Transport {
 public:
  TlsTransport(Socket socket, std::shared_ptr<const TlsContext> context)
      : context_(std::move(context)),
        socket_(std::move(socket)),
        session_(*context_, socket_.get(), Side::client) {}

  size_t send_some(std::span<const std::byte> bytes) override {
    return moved(session_.send(bytes));
  }
  size_t receive_some(std::span<std::byte> into, int* descriptor) override {
    *descriptor = -1;
    return moved(session_.receive(into));
  }

  [[nodiscard]] int descriptor() const override { return socket_.get(); }
  [[nodiscard]] short awaited(bool sending) const override { return session_.awaited(sending); }
  [[nodiscard]] Wire wire() const override { return Wire::tls; }

 private:
  size_t moved(const Moved& moved) const {
    if (moved.move != Move::ended) {
      return moved.bytes;
    }
    if (moved.error == EPROTO) {
      throw AccessRefused(text("TLS failed (", session_.failure(),
                               "); give all processes of the job TLS, and certificates that "
                               "its authority signed"));
    }
    const char* const when =
        session_.is_begun() ? ""
                            : " before TLS had begun; give all processes of the job TLS, or none";
    throw OwnerLost(moved.error == 0
                        ? text("the connection was ended from there", when)
                        : text("the connection broke (", errno_text(moved.error), ")", when));
  }

  std::shared_ptr<const TlsContext> context_;  // shared with the other connections
  Socket socket_;
  TlsSession session_;
};

std::string refusal_text(Verdict verdict, uint16_t version) {
  switch (verdict) {
    case Verdict::other_version:
      return text("it speaks version ", version, " of the store's protocol, this process ",
                  kProtocolVersion, "; run the same version of tenure in all of a job");
    case Verdict::other_job:
      return "it belongs to another job";
    case Verdict::full:
      return "it has as many connections as it may have";
    case Verdict::no_descriptors:
      return "it has no descriptors left for another connection; raise its limit on open files "
             "(ulimit -n)";
    default:
      return "it refused";
  }
}

// A server with many strangers ends some of them before it has heard them.
class Unheard : public OwnerLost {
 public:
  using OwnerLost::OwnerLost;
};

// What `connect` makes, which may throw Unheard and is tried again then.
template <class Connect>
std::unique_ptr<Transport> heard(const Connect& connect) {
  for (int hello = 1;; ++hello) {
    try {
      return connect();
    } catch (const Unheard&) {
      if (hello == kMostHellos) {
        throw;
      }
    }
  }
}

void shake_hands(Transport& transport, const Credentials& who, Transport::Deadline deadline) {
  Hello hello;
  hello.wire = transport.wire();
  hello.job = job_digest(who.job);
  const bool proves = transport.wire() != Wire::local;
  if (proves) {
    hello.nonce = new_nonce();
  }
  try {
    send_all(transport, encode(hello), deadline);
    // One that is full says so before it listens: that is what is read next.
  } catch (const OwnerLost&) {  // NOLINT(bugprone-empty-catch)
  }
  std::array<std::byte, kAnswerBytes> bytes{};
  try {
    receive_all(transport, bytes, deadline);
  } catch (const OwnerLost& ended) {
    throw Unheard(ended.what());
  }
  const auto answer = decode_answer(bytes);
  if (!answer) {
    throw AccessRefused("what answers there is not a store of Tenure's");
  }
  if (answer->version != kProtocolVersion && answer->verdict == Verdict::welcome) {
    throw AccessRefused(refusal_text(Verdict::other_version, answer->version));
  }
  if (answer->verdict != Verdict::welcome) {
    throw AccessRefused(refusal_text(answer->verdict, answer->version));
  }
  if (!proves) {
    return;
  }
  if (!equal(answer->proof, proof_of(who.secret, Side::server, hello, answer->nonce))) {
    throw AccessRefused("it does not know this job's secret; give all processes the same one");
  }
  send_all(transport, proof_of(who.secret, Side::client, hello, answer->nonce), deadline);
}

void wait_for(int descriptor, short events, Transport::Deadline deadline) {
  pollfd awaited{descriptor, events, 0};
  while (poll_or_act(&awaited, 1, poll_time(deadline)) <= 0) {
    if (std::chrono::steady_clock::now() >= deadline) {
      throw StoreTimeout("no connection came about in the time that was given");
    }
  }
}

// Throws OwnerLost if nobody listens there.
void connect(int descriptor, const sockaddr* address, socklen_t length,
             Transport::Deadline deadline) {
  while (::connect(descriptor, address, length) != 0) {
    if (errno == EINPROGRESS || errno == EINTR) {
      wait_for(descriptor, POLLOUT, deadline);
      int error = 0;
      socklen_t size = sizeof(error);
      getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size);
      if (error == 0) {
        return;
      }
      errno = error;
    }
    if (errno == EAGAIN) {  // a Unix socket whose backlog is full: there is nothing to poll on
      if (std::chrono::steady_clock::now() >= deadline) {
        throw StoreTimeout("no connection came about in the time that was given");
      }
      ::poll(nullptr, 0, static_cast<int>(kCrowded.count()));
      continue;
    }
    if (errno == EISCONN) {
      return;
    }
    if (errno == ETIMEDOUT) {
      throw StoreTimeout("no connection came about: nothing answers there");
    }
    if (errno == EACCES || errno == EPERM) {
      throw AccessRefused(
          text("the system does not allow the connection (", errno_text(errno), ")"));
    }
    throw OwnerLost(text("nobody can be reached there (", errno_text(errno), ")"));
  }
}

Socket new_socket(int family, int protocol) {
  Socket socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, protocol));
  if (!socket.is_open()) {
    throw Error(text("no socket could be made (", errno_text(errno),
                     "); raise the limit on open files (ulimit -n)"));
  }
  return socket;
}

Socket connect_to_any(const addrinfo* addresses, Transport::Deadline deadline) {
  for (const addrinfo* address = addresses;; address = address->ai_next) {
    Socket socket = new_socket(address->ai_family, IPPROTO_TCP);
    try {
      connect(socket.get(), address->ai_addr, address->ai_addrlen, deadline);
      return socket;
    } catch (const OwnerLost&) {
      if (address->ai_next == nullptr) {
        throw;
      }
    }
  }
}

}  // namespace

std::unique_ptr<Transport> connect_local(const std::string& path, const Credentials& who,
                                         Transport::Deadline deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    throw InputError(text("\"", path, "\" is not the path of a Unix socket"));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return heard([&] {
    Socket socket = new_socket(AF_UNIX, 0);
    connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address), deadline);
    // A handle may name any path, and other users may listen at some.
    if (!is_own_user(socket.get())) {
      throw AccessRefused(text("what listens at ", path, " is of another user"));
    }
    auto transport = std::make_unique<SocketTransport>(std::move(socket), Wire::local);
    shake_hands(*transport, who, deadline);
    return transport;
  });
}

std::unique_ptr<Transport> connect_tcp(const std::string& address, uint16_t port,
                                       const Credentials& who, Transport::Deadline deadline) {
  if (who.secret.empty()) {
    throw AccessRefused("TCP is used only with a secret of the job, and this process has none");
  }
  const Addresses addresses = resolve(address, port, deadline);
  return heard([&] {
    Socket socket = connect_to_any(addresses.get(), deadline);
    tune_tcp(socket.get(), kVanishedMs);
    std::unique_ptr<Transport> transport;
    if (who.tls != nullptr) {
      transport = std::make_unique<TlsTransport>(std::move(socket), who.tls);
    } else {
      transport = std::make_unique<SocketTransport>(std::move(socket), Wire::tcp);
    }
    shake_hands(*transport, who, deadline);
    return transport;
  });
}

}  // namespace tenure::store
