// A connection to a server that says whatever a test likes.
#pragma once

#include <tenure/store/hello.h>
#include <tenure/store/identity.h>
#include <tenure/store/messages.h>
#include <tenure/store/socket.h>

#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace tenure::store {

class Stranger {
 public:
  Stranger() = default;
  Stranger(const Origin& to, Wire wire);

  void prepare(Wire wire);
  void connect(const Origin& to);

  // All of it, or as far as the server takes it.
  void say(std::span<const std::byte> bytes) const;
  // Exactly so many bytes; fewer if the connection ends first.
  [[nodiscard]] std::vector<std::byte> hear(size_t bytes, int ms = 20'000) const;
  // Whether the server ended it: what it says before that is thrown away.
  [[nodiscard]] bool is_ended(int ms = 20'000) const;

  [[nodiscard]] Hello hello() const;
  [[nodiscard]] Answer hear_answer() const;
  // As a client that knows the secret. Throws if the server does not.
  void shake_hands() const;
  void introduce(Purpose purpose = Purpose::requests) const;

 private:
  Socket socket_;
  Wire wire_ = Wire::local;
};

}  // namespace tenure::store
