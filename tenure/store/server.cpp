#include <tenure/store/server.h>

#include <tenure/config.h>
#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/quiet_thread.h>
#include <tenure/core/text.h>

#if TENURE_HAVE_ASIO
#include <tenure/store/connection.h>
#include <tenure/store/listening.h>
#include <tenure/store/listening_sockets.h>
#include <tenure/store/serving.h>

#include <asio/executor_work_guard.hpp>
#include <asio/post.hpp>
#include <asio/steady_timer.hpp>
#endif

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

namespace tenure::store {

#if TENURE_HAVE_ASIO

namespace {

void check(const ServerOptions& options) {
  check_job(options.job);
  check_member(options.self);
  struct stat state{};
  if (::stat(options.folder.c_str(), &state) != 0) {
    throw Error(text("the folder ", options.folder,
                     " for the store's sockets cannot be used: ", errno_text(errno)));
  }
  if (!S_ISDIR(state.st_mode) || state.st_uid != ::geteuid() || (state.st_mode & 077U) != 0) {
    throw Error(text("the folder ", options.folder, " for the store's sockets is not this user's ",
                     "alone; use one of mode 0700"));
  }
  if (options.listen && options.secret.empty()) {
    throw InputError(
        "the store listens on TCP only with a secret of the job: set one, or leave "
        "TCP out");
  }
}

std::string socket_path(const ServerOptions& options) {
  std::string role = options.self.role.substr(0, 16);
  std::ranges::replace_if(
      role,
      [](char character) {
        return (character < 'a' || character > 'z') && (character < 'A' || character > 'Z') &&
               (character < '0' || character > '9') && character != '_';
      },
      '_');
  char incarnation[17];
  std::snprintf(incarnation, sizeof(incarnation), "%016llx",
                static_cast<unsigned long long>(options.self.incarnation));
  return text(options.folder, "/", role, "-", options.self.rank, "-", incarnation, ".sock");
}

std::string advertised(const ServerOptions& options, const HostPort& listened) {
  if (!options.advertise.empty()) {
    return options.advertise;
  }
  if (listened.host == "0.0.0.0" || listened.host == "::") {
    throw InputError(text("the store would listen on every address of this host (", listened.host,
                          "); say under which one others reach it (advertise)"));
  }
  return listened.host;
}

}  // namespace

struct Server::State {
  State(Objects& objects, ServerOptions options)
      : serving(objects, std::move(options)), clock(serving.io), generation(fork_generation()) {}

  void start();
  void tick();
  void run();
  void stop();

  Serving serving;
  std::unique_ptr<Listening> local;
  std::unique_ptr<Listening> tcp;
  asio::steady_timer clock;
  uint32_t generation;
  std::jthread thread;
};

void Server::State::start() {
  const ServerOptions& options = serving.options;
  Origin origin{.job = options.job,
                .owner = options.self,
                .host = this_host(),
                .path = socket_path(options),
                .address = {},
                .port = 0};
  if (options.listen) {
    const HostPort where = parse_host_port(*options.listen);
    origin.address = advertised(options, where);
    const auto wire = options.tls ? Wire::tls : Wire::tcp;
    tcp = std::make_unique<Listening>(serving, listen_tcp(where, &origin.port), wire);
  }
  check_origin(origin);
  local = std::make_unique<Listening>(serving, listen_local(origin.path), Wire::local);
  serving.origin = std::make_shared<const Origin>(std::move(origin));
  local->start();
  if (tcp) {
    tcp->start();
  }
  tick();
  thread = quiet_thread("the store server's thread", [this] { run(); });
}

void Server::State::run() {
  auto work = asio::make_work_guard(serving.io);
  while (!serving.io.stopped()) {
    try {
      serving.io.run();
      // What a connection throws ends that connection. This is what is left: no memory for a timer
      // or a message, and the next round may have it.
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    }
  }
}

void Server::State::tick() {
  const int64_t shortest =
      std::min({serving.options.hello_ms, serving.options.stall_ms, serving.options.lease_ms});
  clock.expires_after(std::chrono::milliseconds(std::clamp<int64_t>(shortest / 8, 5, 500)));
  clock.async_wait([this](const asio::error_code& error) {
    if (error) {
      return;
    }
    serving.sweep();
    serving.objects.expire();
    tick();
  });
}

void Server::State::stop() {
  asio::post(serving.io, [this] {
    clock.cancel();
    local->stop();
    if (tcp) {
      tcp->stop();
    }
    while (!serving.connections.empty()) {
      const auto connection = serving.connections.begin()->second;
      connection->end();
    }
    serving.io.stop();
  });
  thread.join();
  ::unlink(serving.origin->path.c_str());
}

Server::Server(Objects& objects, ServerOptions options) {
  check(options);
  state_ = std::make_unique<State>(objects, std::move(options));
  try {
    state_->start();
  } catch (...) {
    if (state_->serving.origin) {
      ::unlink(state_->serving.origin->path.c_str());
    }
    throw;
  }
}

Server::~Server() {
  if (state_->generation != fork_generation()) {
    // The parent's: its thread is not here, and its sockets are closed in this process already.
    [[maybe_unused]] auto* const parents = state_.release();
    return;
  }
  state_->stop();
}

std::shared_ptr<const Origin> Server::origin() const { return state_->serving.origin; }

Account Server::close(const ScopeName& scope, const Member& by) {
  if (state_->generation != fork_generation()) {
    throw Error(text("scope ", scope_text(scope),
                     " cannot be closed here: this process was forked ",
                     "from the one that has the store; join the store in it"));
  }
  return state_->serving.close(scope, by);
}

void Server::tell_withdrawn() {
  if (state_->generation == fork_generation()) {
    state_->serving.tell_withdrawn();
  }
}

ServerStats Server::stats() const { return state_->serving.counters.read(); }

#else

struct Server::State {};

Server::Server(Objects& /*objects*/, ServerOptions /*options*/) {
  throw Error("this build of Tenure has no store server: it was built without Asio (libasio-dev)");
}
Server::~Server() = default;
std::shared_ptr<const Origin> Server::origin() const { return nullptr; }
Account Server::close(const ScopeName& /*scope*/, const Member& /*by*/) { return {}; }
void Server::tell_withdrawn() {}
ServerStats Server::stats() const { return {}; }

#endif

}  // namespace tenure::store
