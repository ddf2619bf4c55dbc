// Exchange: one owner's part of a call: what goes out to it and what comes back, without a wait of
// its own; run() waits for several at once, on the calling thread. Torch-free.
#pragma once

#include <tenure/store/connections.h>
#include <tenure/store/descriptor.h>
#include <tenure/store/messages.h>
#include <tenure/store/transport.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <span>
#include <vector>

namespace tenure::store {

class Exchange {
 public:
  explicit Exchange(Route route) : route_(std::move(route)) {}
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  Exchange(Exchange&&) = delete;
  Exchange& operator=(Exchange&&) = delete;
  virtual ~Exchange();

  // Begins on this connection; once more, from the front, if the first had lain idle too long.
  void begin(std::unique_ptr<Line> line);
  // The connection, for the next one. REQUIRES: finished().
  std::unique_ptr<Line> end();

  [[nodiscard]] const Route& route() const { return route_; }
  [[nodiscard]] virtual bool finished() const = 0;
  // Whether the connection had lain idle and not a byte came over it: the owner ended it before it
  // saw this request.
  [[nodiscard]] bool may_begin_again() const { return line_ && line_->was_idle && !heard_; }

 protected:
  // Puts a message behind what is to be sent.
  void say(MessageKind kind, std::span<const std::byte> body);
  // What the first message is; called at each begin().
  virtual void speak() = 0;
  // A message came. Returns where its payload goes, if it has one.
  virtual std::byte* hear(const Header& header, std::span<const std::byte> body) = 0;
  // All of the payload is where hear() said.
  virtual void payload_came() {}
  // All that was asked is answered: the connection lies idle until the next message.
  void rest();
  // The next descriptor that came, whose number is kLostDescriptor if there was no room for it.
  // Throws InputError if none did.
  Descriptor take_descriptor();

 private:
  friend class Round;

  // As far as it goes now, or until another owner has a turn: then it goes on without a wait, since
  // what comes next may lie in the transport already.
  void move_all();
  void send();
  bool receive();
  void parse();
  [[nodiscard]] short awaited() const;
  void give_up();

  Route route_;
  std::unique_ptr<Line> line_;
  bool heard_ = false;
  bool goes_on_ = false;
  std::vector<std::byte> outgoing_;
  size_t sent_ = 0;
  std::byte* payload_ = nullptr;
  uint64_t payload_left_ = 0;
  std::deque<Descriptor> descriptors_;
};

// Waits for several exchanges at once.
class Round {
 public:
  // `connections` replaces one that an owner ended while it lay idle.
  Round(Connections& connections, Transport::Deadline deadline)
      : connections_(connections), deadline_(deadline) {}

  // Until all are finished. Throws the first failure at once, with the route in its text.
  // REQUIRES: each has begun.
  void run(std::span<Exchange* const> exchanges);
  // The same, but a failure ends that exchange alone. Answers what became of each: null if all is
  // well. REQUIRES: each has begun or has a failure in `failures`.
  void run(std::span<Exchange* const> exchanges, std::span<std::exception_ptr> failures);

 private:
  enum class OnFailure : uint8_t { stop, go_on };
  void run(std::span<Exchange* const> exchanges, std::span<std::exception_ptr> failures,
           OnFailure on_failure);
  // Null: under way or finished.
  std::exception_ptr turn(Exchange& exchange);
  static std::exception_ptr move(Exchange& exchange);

  Connections& connections_;
  Transport::Deadline deadline_;
};

}  // namespace tenure::store
