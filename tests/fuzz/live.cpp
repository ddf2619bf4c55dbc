#include "live.h"

#include <tenure/store/client.h>
#include <tenure/store/frame.h>
#include <tenure/store/hello.h>
#include <tenure/store/messages.h>
#include <tenure/store/objects.h>
#include <tenure/store/server.h>
#include <tenure/store/socket.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <tuple>
#include <vector>

namespace tenure::store::fuzz {
namespace {

using Bytes = std::span<const std::byte>;

constexpr const char* kJob = "fuzz";
constexpr int kPatienceMs = 20'000;
constexpr size_t kSlowly = 7;
constexpr std::array<uint64_t, 5> kSizes{0, 10, 1000, 100'000, 300'000};

Secret secret() { return Secret("sixteen bytes or more"); }
ScopeName scope() { return {.kind = "step", .id = "1"}; }

// A folder of its own, gone with it.
struct Folder {
  Folder() : path("/tmp/tenure-fuzz-XXXXXX") {
    if (::mkdtemp(path.data()) == nullptr) {
      ::abort();
    }
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  Folder(Folder&&) = delete;
  Folder& operator=(Folder&&) = delete;
  ~Folder() { std::filesystem::remove_all(path); }

  std::string path;
};

ServerOptions server_options(const std::string& folder) {
  ServerOptions options;
  options.job = kJob;
  options.self = {.role = "rollout", .rank = 0, .incarnation = 11};
  options.folder = folder;
  options.listen = "127.0.0.1:0";
  options.secret = secret();
  return options;
}

ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

// From another address of this host each time: one has 28,000 ports, and an end holds one for a
// minute.
void take_turns(int socket) {
  static uint32_t turn = 0;
  sockaddr_in from{};
  from.sin_family = AF_INET;
  from.sin_addr.s_addr = htonl(INADDR_LOOPBACK + (++turn % 200));
  const int on = 1;
  // Where that fails, from any address.
  std::ignore = ::setsockopt(socket, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
  std::ignore = ::bind(socket, reinterpret_cast<const sockaddr*>(&from), sizeof(from));
}

Socket connected(const Origin& origin, Wire wire) {
  const bool is_local = wire == Wire::local;
  Socket socket(::socket(is_local ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!is_local) {
    take_turns(socket.get());
  }
  sockaddr_un local{};
  sockaddr_in tcp{};
  local.sun_family = AF_UNIX;
  origin.path.copy(local.sun_path, sizeof(local.sun_path) - 1);
  tcp.sin_family = AF_INET;
  tcp.sin_port = htons(origin.port);
  inet_pton(AF_INET, origin.address.c_str(), &tcp.sin_addr);
  const auto* const address = is_local ? reinterpret_cast<const sockaddr*>(&local)
                                       : reinterpret_cast<const sockaddr*>(&tcp);
  if (::connect(socket.get(), address, is_local ? sizeof(local) : sizeof(tcp)) != 0) {
    socket.close();
  }
  return socket;
}

// Whether there is something to read within the time. The fuzzer's own clock interrupts waits.
bool is_readable(const Socket& socket, int wait_ms) {
  pollfd readable{.fd = socket.get(), .events = POLLIN, .revents = 0};
  int ready = 0;
  do {
    ready = ::poll(&readable, 1, wait_ms);
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

// Throws away what the server says, for as long as it says something. Whether it ended.
bool hear_out(const Socket& socket, int wait_ms) {
  std::vector<std::byte> thrown_away(64 << 10);
  while (is_readable(socket, wait_ms)) {
    if (::recv(socket.get(), thrown_away.data(), thrown_away.size(), MSG_DONTWAIT) <= 0) {
      return true;
    }
  }
  return false;
}

// All of it, or as far as the server takes it; a server that answers is heard meanwhile.
void say(const Socket& socket, Bytes bytes, size_t at_once) {
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(at_once, bytes.size()));
    const ssize_t sent =
        ::send(socket.get(), piece.data(), piece.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes = bytes.subspan(static_cast<size_t>(sent));
    } else if (errno != EAGAIN || hear_out(socket, 1)) {
      return;
    }
  }
}

bool hear(const Socket& socket, std::span<std::byte> to) {
  while (!to.empty()) {
    if (!is_readable(socket, kPatienceMs)) {
      return false;
    }
    const ssize_t got = ::recv(socket.get(), to.data(), to.size(), 0);
    if (got <= 0) {
      return false;
    }
    to = to.subspan(static_cast<size_t>(got));
  }
  return true;
}

bool shake_hands(const Socket& socket, Wire wire) {
  Hello hello;
  hello.wire = wire;
  hello.job = job_digest(kJob);
  if (wire != Wire::local) {
    hello.nonce = new_nonce();
  }
  say(socket, encode(hello), kHelloBytes);
  std::array<std::byte, kAnswerBytes> heard{};
  if (!hear(socket, heard)) {
    return false;
  }
  const auto answer = decode_answer(heard);
  if (!answer || answer->verdict != Verdict::welcome) {
    return false;
  }
  if (wire != Wire::local) {
    say(socket, proof_of(secret(), Side::client, hello, answer->nonce), kProofBytes);
  }
  return true;
}

std::vector<std::byte> introduction(Purpose purpose) {
  return frame(MessageKind::introduce,
               encode(Introduce{.job = kJob,
                                .member = {.role = "trainer", .rank = 9, .incarnation = 99},
                                .purpose = purpose}));
}

}  // namespace

struct LiveServer::State {
  // A server, and what it has.
  struct Served {
    Served()
        : objects({.role = "rollout", .rank = 0, .incarnation = 11}),
          server(objects, server_options(folder.path)) {
      for (const uint64_t bytes : kSizes) {
        handles.push_back(put(bytes));
      }
    }

    Handle put(uint64_t bytes) {
      const Layout layout{Dtype::uint8, {static_cast<int64_t>(bytes)}};
      const std::vector<std::byte> content(bytes, std::byte{7});
      const auto placed = objects.put(
          {.scope = scope(), .call = {}, .collectors = {}, .layout = layout, .site = {}}, content);
      return {.origin = server.origin(),
              .scope = scope(),
              .id = placed.id,
              .layout = layout,
              .unstored = placed.unstored};
    }

    Folder folder;
    Objects objects;
    Server server;
    std::vector<Handle> handles;
  };

  // Somebody freed something, or closed the scope: who comes next finds all as it was.
  void renew_if_changed() {
    if (now->objects.stats().objects != kSizes.size()) {
      now.reset();
      now = std::make_unique<Served>();
    }
  }

  std::unique_ptr<Served> now = std::make_unique<Served>();
  ptrdiff_t descriptors = -1;
};

LiveServer::LiveServer() : state_(std::make_unique<State>()) {}
LiveServer::~LiveServer() = default;

std::string LiveServer::fault(Bytes input) {
  if (input.empty()) {
    return {};
  }
  state_->renew_if_changed();
  const auto opening = static_cast<unsigned>(input.front());
  const auto wire = (opening & 4U) != 0 ? Wire::tcp : Wire::local;
  const auto& server = state_->now->server;
  const uint64_t accepted = server.stats().accepted;
  {
    const Socket socket = connected(*server.origin(), wire);
    if (!socket.is_open()) {
      return "the server takes no connection";
    }
    if ((opening & 3U) != 0 && !shake_hands(socket, wire)) {
      return "the server does not welcome a member";
    }
    if ((opening & 2U) != 0) {
      const auto purpose = (opening & 1U) != 0 ? Purpose::notices : Purpose::requests;
      say(socket, introduction(purpose), input.size() + 1000);
    }
    const auto rest = input.subspan(1);
    say(socket, rest, (opening & 16U) != 0 ? kSlowly : rest.size());
    if ((opening & 8U) == 0) {
      ::shutdown(socket.get(), SHUT_WR);
      if (!hear_out(socket, kPatienceMs)) {
        return "the server keeps a connection whose client has said all";
      }
    }
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  for (auto stats = server.stats(); stats.accepted == accepted || stats.connections != 0;
       stats = server.stats()) {
    if (std::chrono::steady_clock::now() > end) {
      return "a connection stays that its client has ended";
    }
    ::usleep(20);
  }
  return {};
}

std::string LiveServer::fault_of_the_rest() {
  state_->renew_if_changed();
  {
    auto& served = *state_->now;
    ClientOptions options;
    options.job = kJob;
    options.self = {.role = "trainer", .rank = 1, .incarnation = 98};
    options.secret = secret();
    Client client(options);
    const Handle handle = served.put(200'000);
    for (const Over over : {Over::best, Over::tcp}) {
      Want want;
      want.handle = &handle;
      want.over = over;
      std::vector<std::byte> copy;
      const auto gots =
          client.get({&want, 1}, std::chrono::steady_clock::now() + std::chrono::seconds(20),
                     [&](size_t /*want*/, uint64_t bytes) {
                       copy.resize(bytes);
                       return copy.data();
                     });
      const auto& mapping = gots.front().mapping;
      const Bytes got = mapping ? Bytes(mapping->data(), mapping->bytes()) : Bytes(copy);
      if (got.size() != 200'000 ||
          !std::ranges::all_of(got, [](std::byte byte) { return byte == std::byte{7}; })) {
        return "a member got other bytes than were put";
      }
    }
    served.objects.free(handle.id, options.self);
  }
  state_->now.reset();
  state_->now = std::make_unique<State::Served>();
  const auto descriptors = open_descriptors();
  if (state_->descriptors >= 0 && descriptors != state_->descriptors) {
    return "descriptors stay open";
  }
  state_->descriptors = descriptors;
  return {};
}

}  // namespace tenure::store::fuzz
