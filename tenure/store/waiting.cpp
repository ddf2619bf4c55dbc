#include <tenure/store/waiting.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/errors.h>

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <utility>

namespace tenure::store {
namespace {

thread_local const std::function<void()>* when_interrupted = nullptr;

void wait(const Transport& transport, bool sending, Transport::Deadline deadline) {
  if (std::chrono::steady_clock::now() >= deadline) {
    throw StoreTimeout("no answer came in the time that was given");
  }
  pollfd awaited{transport.descriptor(), transport.awaited(sending), 0};
  poll_or_act(&awaited, 1, poll_time(deadline));
}

}  // namespace

WhenInterrupted::WhenInterrupted(std::function<void()> act)
    : act_(std::move(act)), before_(std::exchange(when_interrupted, &act_)) {}

WhenInterrupted::~WhenInterrupted() { when_interrupted = before_; }

int poll_or_act(pollfd* awaited, size_t count, int milliseconds) {
  const int ready = ::poll(awaited, count, milliseconds);
  if (ready < 0 && errno == EINTR && when_interrupted != nullptr) {
    (*when_interrupted)();
  }
  return ready;
}

int poll_time(Transport::Deadline deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 3'600'000));
}

void send_all(Transport& transport, std::span<const std::byte> bytes,
              Transport::Deadline deadline) {
  while (!bytes.empty()) {
    const size_t sent = transport.send_some(bytes);
    bytes = bytes.subspan(sent);
    if (sent == 0) {
      wait(transport, true, deadline);
    }
  }
}

void receive_all(Transport& transport, std::span<std::byte> into, Transport::Deadline deadline) {
  while (!into.empty()) {
    int descriptor = -1;
    const size_t got = transport.receive_some(into, &descriptor);
    if (descriptor >= 0) {
      ::close(descriptor);  // none belongs to these messages
    }
    into = into.subspan(got);
    if (got == 0) {
      wait(transport, false, deadline);
    }
  }
}

std::vector<std::byte> receive_body(Transport& transport, MessageKind kind,
                                    Transport::Deadline deadline) {
  std::array<std::byte, kHeaderBytes> bytes{};
  receive_all(transport, bytes, deadline);
  const auto header = decode_header(bytes);
  if (!header || header->kind != kind) {
    throw InputError("what came is not the answer that the store's protocol has here");
  }
  std::vector<std::byte> body(header->body_bytes);
  receive_all(transport, body, deadline);
  return body;
}

}  // namespace tenure::store
