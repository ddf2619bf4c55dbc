#include <tenure/store/resolving.h>

#include <tenure/core/error.h>
#include <tenure/core/quiet_thread.h>
#include <tenure/core/text.h>
#include <tenure/store/errors.h>
#include <tenure/store/socket.h>
#include <tenure/store/waiting.h>

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

// Note [Looking up a name]
// getaddrinfo() cannot be given a deadline and cannot be interrupted: with a name server that does
// not answer it takes as long as resolv.conf says. So a thread of its own asks, and is left to
// itself when the time is over; what it then finds is thrown away. An address needs no thread.

namespace tenure::store {
namespace {

constexpr int kMostLookups = 64;  // that nobody has answered
std::atomic<int> lookups{0};

struct Lookup {
  Socket bell{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  std::mutex mutex;
  int failed = 0;
  Addresses found{nullptr, ::freeaddrinfo};

  Lookup() = default;
  Lookup(const Lookup&) = delete;
  Lookup& operator=(const Lookup&) = delete;
  Lookup(Lookup&&) = delete;
  Lookup& operator=(Lookup&&) = delete;
  ~Lookup() { --lookups; }
};

addrinfo hints_with(int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  return hints;
}

Addresses checked(const std::string& name, int failed, Addresses found) {
  if (failed == 0) {
    return found;
  }
  const auto why = text("(", gai_strerror(failed), ")");
  if (failed == EAI_AGAIN) {
    throw StoreTimeout(text("the name ", name, " cannot be looked up now ", why));
  }
  throw OwnerLost(text("the name ", name, " leads nowhere ", why));
}

}  // namespace

Addresses resolve(const std::string& name, uint16_t port, Transport::Deadline deadline,
                  const Resolver& resolver) {
  const auto number = std::to_string(port);
  const addrinfo as_address = hints_with(AI_NUMERICHOST);
  addrinfo* found = nullptr;
  if (::getaddrinfo(name.c_str(), number.c_str(), &as_address, &found) == 0) {
    return {found, ::freeaddrinfo};
  }
  if (++lookups > kMostLookups) {
    --lookups;
    throw StoreTimeout(text("the name ", name, " cannot be looked up now: ", kMostLookups,
                            " others wait for an answer"));
  }
  const auto lookup = std::make_shared<Lookup>();  // shared with the thread that asks
  if (!lookup->bell.is_open()) {
    throw Error(text("no name can be looked up (", errno_text(errno),
                     "); raise the limit on open files (ulimit -n)"));
  }
  quiet_thread("the thread that looks up a name", [lookup, resolver, name, number] {
    const addrinfo by_name = hints_with(0);
    addrinfo* answer = nullptr;
    const int failed = resolver(name.c_str(), number.c_str(), &by_name, &answer);
    const std::lock_guard lock(lookup->mutex);
    lookup->failed = failed;
    lookup->found.reset(answer);
    const uint64_t one = 1;
    static_cast<void>(::write(lookup->bell.get(), &one, sizeof(one)));
  }).detach();
  pollfd awaited{lookup->bell.get(), POLLIN, 0};
  while (poll_or_act(&awaited, 1, poll_time(deadline)) <= 0) {
    if (std::chrono::steady_clock::now() >= deadline) {
      throw StoreTimeout(text("the name ", name, " was not found in the time that was given"));
    }
  }
  const std::lock_guard lock(lookup->mutex);
  return checked(name, lookup->failed, std::move(lookup->found));
}

}  // namespace tenure::store
