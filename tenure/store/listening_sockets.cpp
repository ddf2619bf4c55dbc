// Sockets that listen. Free of Asio.
#include <tenure/store/listening_sockets.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

namespace tenure::store {
namespace {

constexpr int kBacklog = 4096;

uint16_t port_of(int descriptor) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw Error(text("the store's port cannot be read: ", errno_text(errno)));
  }
  // The port lies at the same place for both families.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

}  // namespace

Socket listen_local(const std::string& path) {
  // Under its name only when it listens: one that refuses connections under its name is dead.
  const std::string before = path + "~";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (before.size() >= sizeof(address.sun_path)) {
    throw InputError(text("the path ", path, " is too long for a Unix socket (at most ",
                          sizeof(address.sun_path) - 2,
                          " bytes); choose a shorter folder for the store's sockets"));
  }
  std::memcpy(address.sun_path, before.c_str(), before.size() + 1);
  Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const bool listens =
      socket.is_open() &&
      ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
      ::chmod(before.c_str(), 0600) == 0 && ::listen(socket.get(), kBacklog) == 0 &&
      std::rename(before.c_str(), path.c_str()) == 0;
  if (!listens) {
    const int error = errno;
    ::unlink(before.c_str());
    throw Error(text("the store cannot listen at ", path, ": ", errno_text(error)));
  }
  return socket;
}

Socket listen_tcp(const HostPort& where, uint16_t* port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed =
      getaddrinfo(where.host.c_str(), std::to_string(where.port).c_str(), &hints, &found);
  if (failed != 0) {
    throw InputError(text("the store cannot listen on ", where.host, ": ", gai_strerror(failed)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  int error = 0;
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    Socket socket(
        ::socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
    const int on = 1;
    const bool listens = socket.is_open() &&
                         setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
                         ::bind(socket.get(), address->ai_addr, address->ai_addrlen) == 0 &&
                         ::listen(socket.get(), kBacklog) == 0;
    if (listens) {
      *port = port_of(socket.get());
      return socket;
    }
    error = errno;
  }
  throw Error(text("the store cannot listen on ", host_port_text(where.host, where.port), ": ",
                   errno_text(error), "; port 0 lets the system choose a free one"));
}

}  // namespace tenure::store
