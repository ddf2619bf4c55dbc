// Whole messages over a transport, with a deadline: for the first words of a connection.
// Torch-free.
#pragma once

#include <tenure/store/incoming.h>
#include <tenure/store/messages.h>
#include <tenure/store/transport.h>

#include <poll.h>

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace tenure::store {

// Milliseconds for poll(): rounded up, never negative, and 0 when the time is over.
int poll_time(Transport::Deadline deadline);

// While it lives, a signal that ends a wait of the calling thread has `act` called on that thread.
// It may throw, which ends the call: that is how Ctrl-C gets through.
class WhenInterrupted {
 public:
  explicit WhenInterrupted(std::function<void()> act);
  WhenInterrupted(const WhenInterrupted&) = delete;
  WhenInterrupted& operator=(const WhenInterrupted&) = delete;
  WhenInterrupted(WhenInterrupted&&) = delete;
  WhenInterrupted& operator=(WhenInterrupted&&) = delete;
  ~WhenInterrupted();

 private:
  std::function<void()> act_;
  const std::function<void()>* before_;
};
// As poll(); calls what WhenInterrupted says, if a signal ended it.
int poll_or_act(pollfd* awaited, size_t count, int milliseconds);

// Each throws StoreTimeout at the deadline, and OwnerLost when the connection ends.
void send_all(Transport& transport, std::span<const std::byte> bytes, Transport::Deadline deadline);
void receive_all(Transport& transport, std::span<std::byte> into, Transport::Deadline deadline);
// The body of a message that must be of this kind. Throws InputError for another.
std::vector<std::byte> receive_body(Transport& transport, MessageKind kind,
                                    Transport::Deadline deadline);

}  // namespace tenure::store
