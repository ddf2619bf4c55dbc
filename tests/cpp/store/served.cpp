#include "served.h"

#include <tenure/core/quiet_thread.h>
#include <tenure/store/handle.h>
#include <tenure/store/socket.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>

namespace tenure::store {
namespace {

constexpr const char* kSizes = "TENURE_TEST_OWNER_SIZES";
constexpr const char* kFolder = "TENURE_TEST_OWNER_FOLDER";
constexpr int kSays = 3;   // where the owner writes its handles
constexpr int kLeash = 4;  // where it reads the end

// Not a test: what an OwnerProcess runs.
TEST(OwnerProcess, DISABLED_Serves) {
  const char* sizes = std::getenv(kSizes);
  ASSERT_NE(sizes, nullptr);
  const Member self{"rollout", 0, new_incarnation()};
  Objects objects(self);
  const Server server(objects, server_options(std::getenv(kFolder), self));
  std::istringstream in(sizes);
  std::string said;
  uint64_t seed = 0;
  for (uint64_t bytes = 0; in >> bytes; ++seed) {
    const Terms how = terms(step(1), bytes);
    said += to_text(handle_to(server.origin(), how, objects.put(how, pattern(bytes, seed)))) + '\n';
  }
  said += '\n';
  ASSERT_EQ(::write(kSays, said.data(), said.size()), static_cast<ssize_t>(said.size()));
  ::close(kSays);
  char end = 0;
  static_cast<void>(::read(kLeash, &end, 1));
}

std::vector<Handle> read_handles(int from) {
  std::string said;
  char piece[4096];
  for (ssize_t got = 0; (got = ::read(from, piece, sizeof(piece))) > 0;) {
    said.append(piece, static_cast<size_t>(got));
  }
  std::vector<Handle> handles;
  std::istringstream in(said);
  for (std::string line; std::getline(in, line) && !line.empty();) {
    handles.push_back(handle_from_text(line));
  }
  return handles;
}

}  // namespace

OwnerProcess::OwnerProcess(const std::vector<uint64_t>& sizes) {
  int says[2];
  int leash[2];
  if (::pipe2(says, O_CLOEXEC) != 0 || ::pipe2(leash, O_CLOEXEC) != 0) {
    throw Error("no pipe for the owner's process");
  }
  std::string listed;
  for (const uint64_t bytes : sizes) {
    listed += std::to_string(bytes) + " ";
  }
  ::setenv(kSizes, listed.c_str(), 1);
  ::setenv(kFolder, folder_.path().c_str(), 1);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // Past the numbers that are written to.
  const int from = ::fcntl(says[1], F_DUPFD_CLOEXEC, 10);
  const int to = ::fcntl(leash[0], F_DUPFD_CLOEXEC, 10);
  posix_spawn_file_actions_adddup2(&actions, from, kSays);
  posix_spawn_file_actions_adddup2(&actions, to, kLeash);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  const char* arguments[] = {"store_tests", "--gtest_also_run_disabled_tests",
                             "--gtest_filter=OwnerProcess.DISABLED_Serves", nullptr};
  const int failed = ::posix_spawn(&process_, "/proc/self/exe", &actions, nullptr,
                                   const_cast<char**>(arguments), environ);
  posix_spawn_file_actions_destroy(&actions);
  for (const int descriptor : {says[1], leash[0], from, to}) {
    ::close(descriptor);
  }
  leash_ = leash[1];
  if (failed == 0) {
    handles_ = read_handles(says[0]);
  }
  ::close(says[0]);
}

OwnerProcess::~OwnerProcess() {
  ::close(leash_);
  if (process_ > 0) {
    ::kill(process_, SIGCONT);
    ::waitpid(process_, nullptr, 0);
  }
}

void OwnerProcess::stop() const {
  ::kill(process_, SIGSTOP);
  ::waitpid(process_, nullptr, WUNTRACED);
}

void OwnerProcess::go_on() const { ::kill(process_, SIGCONT); }

void OwnerProcess::kill() {
  ::kill(process_, SIGKILL);
  ::waitpid(process_, nullptr, 0);
  process_ = -1;
}

struct Relay::State {
  struct Pair {
    int client = -1;
    int server = -1;
    size_t index = 0;
  };

  void run();
  bool pass(int from, int to, std::vector<std::byte>* record) const;

  Origin to;
  int listening = -1;
  uint16_t port = 0;
  int bell = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::atomic<bool> frozen{false};
  std::atomic<bool> ends_all{false};
  std::atomic<bool> stopped{false};
  mutable std::mutex mutex;
  std::vector<std::vector<std::byte>> recorded;
  std::vector<Pair> pairs;
  std::jthread thread;
};

bool Relay::State::pass(int from, int to_fd, std::vector<std::byte>* record) const {
  std::byte piece[64 << 10];
  const ssize_t got = ::recv(from, piece, sizeof(piece), 0);
  if (got <= 0) {
    return false;
  }
  if (record != nullptr) {
    const std::lock_guard lock(mutex);
    record->insert(record->end(), piece, piece + got);
  }
  return ::send(to_fd, piece, static_cast<size_t>(got), MSG_NOSIGNAL) == got;
}

void Relay::State::run() {
  const auto end = [](Pair& pair) {
    ::close(pair.client);
    ::close(pair.server);
    pair.client = pair.server = -1;
  };
  while (!stopped) {
    std::vector<pollfd> awaited{{bell, POLLIN, 0}};
    if (!frozen) {
      awaited.push_back({listening, POLLIN, 0});
      for (const Pair& pair : pairs) {
        awaited.push_back({pair.client, POLLIN, 0});
        awaited.push_back({pair.server, POLLIN, 0});
      }
    }
    ::poll(awaited.data(), awaited.size(), -1);
    uint64_t rings = 0;
    static_cast<void>(::read(bell, &rings, sizeof(rings)));
    if (ends_all.exchange(false)) {
      std::ranges::for_each(pairs, end);
      pairs.clear();
      continue;
    }
    if (frozen || awaited.size() == 1) {
      continue;
    }
    for (size_t i = 0; 2 * i + 3 < awaited.size(); ++i) {
      Pair& pair = pairs[i];
      const bool ended =
          (awaited[2 * i + 2].revents != 0 &&
           !pass(pair.client, pair.server, &recorded[pair.index])) ||
          (awaited[2 * i + 3].revents != 0 && !pass(pair.server, pair.client, nullptr));
      if (ended) {
        end(pair);
      }
    }
    std::erase_if(pairs, [](const Pair& pair) { return pair.client < 0; });
    if (awaited[1].revents != 0) {
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_port = htons(to.port);
      inet_pton(AF_INET, to.address.c_str(), &address.sin_addr);
      const int server = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const int client = ::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
      if (::connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
        ::close(client);
        ::close(server);
        continue;
      }
      const std::lock_guard lock(mutex);
      pairs.push_back({client, server, recorded.size()});
      recorded.emplace_back();
    }
  }
  std::ranges::for_each(pairs, end);
}

Relay::Relay(const Origin& to) : state_(std::make_unique<State>()) {
  state_->to = to;
  state_->recorded.reserve(1000);
  state_->listening = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (::bind(state_->listening, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
      0) {
    throw Error("the relay has no address");
  }
  ::listen(state_->listening, 100);
  ::getsockname(state_->listening, reinterpret_cast<sockaddr*>(&address), &length);
  state_->port = ntohs(address.sin_port);
  state_->thread = quiet_thread("the relay", [state = state_.get()] { state->run(); });
}

Relay::~Relay() {
  state_->stopped = true;
  const uint64_t one = 1;
  static_cast<void>(::write(state_->bell, &one, sizeof(one)));
  state_->thread.join();
  ::close(state_->listening);
  ::close(state_->bell);
}

std::shared_ptr<const Origin> Relay::origin() const {
  Origin origin = state_->to;
  origin.port = state_->port;
  return std::make_shared<const Origin>(origin);
}

void Relay::freeze() {
  state_->frozen = true;
  const uint64_t one = 1;
  static_cast<void>(::write(state_->bell, &one, sizeof(one)));
}

void Relay::thaw() {
  state_->frozen = false;
  const uint64_t one = 1;
  static_cast<void>(::write(state_->bell, &one, sizeof(one)));
}

void Relay::end_all() {
  state_->ends_all = true;
  const uint64_t one = 1;
  static_cast<void>(::write(state_->bell, &one, sizeof(one)));
}

std::vector<std::vector<std::byte>> Relay::recorded() const {
  const std::lock_guard lock(state_->mutex);
  return state_->recorded;
}

}  // namespace tenure::store
