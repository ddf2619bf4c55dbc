#include <tenure/store/socket.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>

namespace tenure::store {
namespace {

Moved failed_move(int error) {
  if (error == EAGAIN || error == EWOULDBLOCK || error == EINTR) {
    return {Move::blocked, 0, 0};
  }
  if (error == ETOOMANYREFS || error == EMFILE) {
    return {Move::crowded, 0, error};
  }
  return {Move::ended, 0, error};
}

// The descriptors that came with a message: the first is kept, others (nobody of ours sends more
// than one) are closed.
int take_descriptor(msghdr& message) {
  int taken = -1;
  for (cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr;
       control = CMSG_NXTHDR(&message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(control) + (i * sizeof(int)), sizeof(int));
      if (taken < 0) {
        taken = descriptor;
      } else {
        ::close(descriptor);
      }
    }
  }
  if (taken < 0 && (message.msg_flags & MSG_CTRUNC) != 0) {
    return kLostDescriptor;
  }
  return taken;
}

}  // namespace

HostPort parse_host_port(std::string_view whole) {
  const size_t colon = whole.rfind(':');
  const auto fail = [&]() -> HostPort {
    throw InputError(text("\"", whole, "\" is not an address to listen on; write HOST:PORT, as in ",
                          "127.0.0.1:0 or [::1]:4100"));
  };
  if (colon == std::string_view::npos || colon == 0) {
    return fail();
  }
  std::string_view host = whole.substr(0, colon);
  const std::string_view digits = whole.substr(colon + 1);
  if (host.front() == '[') {
    if (host.size() < 3 || host.back() != ']') {
      return fail();
    }
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return fail();
  }
  uint16_t port = 0;
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (parsed.ec != std::errc{} || parsed.ptr != digits.data() + digits.size()) {
    return fail();
  }
  return {std::string(host), port};
}

std::string host_port_text(const std::string& host, uint16_t port) {
  if (host.find(':') != std::string::npos) {
    return text("[", host, "]:", port);
  }
  return text(host, ":", port);
}

std::string errno_text(int error) { return std::generic_category().message(error); }

bool is_own_user(int descriptor) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == ::geteuid();
}

void tune_tcp(int descriptor, int64_t vanished_ms) {
  const int on = 1;
  const int milliseconds = static_cast<int>(std::clamp<int64_t>(vanished_ms, 1'000, 600'000));
  const int interval = std::max(1, milliseconds / 4'000);
  const int probes = 3;
  // Best effort: without them a connection is only slower to notice what happened to it.
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, &interval, sizeof(interval));
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  setsockopt(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
}

Moved receive_bytes(int descriptor, std::span<std::byte> into) {
  const ssize_t got = ::recv(descriptor, into.data(), into.size(), MSG_DONTWAIT);
  if (got < 0) {
    return failed_move(errno);
  }
  if (got == 0) {
    return {Move::ended, 0, 0};
  }
  return {Move::some, static_cast<size_t>(got), 0};
}

Moved receive_bytes(int descriptor, std::span<std::byte> into, int* passed) {
  *passed = -1;
  iovec piece{into.data(), into.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(descriptor, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) {
    return failed_move(errno);
  }
  *passed = take_descriptor(message);
  if (got == 0) {
    return {Move::ended, 0, 0};
  }
  return {Move::some, static_cast<size_t>(got), 0};
}

Moved send_bytes(int descriptor, std::span<const std::byte> bytes) {
  const ssize_t sent = ::send(descriptor, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0) {
    return failed_move(errno);
  }
  return {Move::some, static_cast<size_t>(sent), 0};
}

Moved send_bytes(int descriptor, std::span<const std::byte> bytes, int passed) {
  iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(rights), &passed, sizeof(int));
  const ssize_t sent = ::sendmsg(descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0) {
    return failed_move(errno);
  }
  return {Move::some, static_cast<size_t>(sent), 0};
}

}  // namespace tenure::store
