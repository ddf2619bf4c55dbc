// Sockets as the store uses them: owned, non-blocking, not inherited by a program that is started.
// Torch-free.
#pragma once

#include <tenure/store/descriptor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tenure::store {

using Socket = Descriptor;

// "HOST:PORT", "[V6]:PORT". Throws InputError.
struct HostPort {
  std::string host;
  uint16_t port = 0;
};
HostPort parse_host_port(std::string_view whole);
std::string host_port_text(const std::string& host, uint16_t port);

// "Connection refused"
std::string errno_text(int error);

// Whether the process at the other end of a Unix socket is of this process's user. Of one that was
// connected to: the process that listens.
bool is_own_user(int descriptor);

// No delay for small frames, and an end of its own for a peer that has vanished: after about
// `vanished_ms` without a sign of it.
void tune_tcp(int descriptor, int64_t vanished_ms);

// What a send or a receive came to.
enum class Move : uint8_t {
  some,     // bytes were moved
  blocked,  // nothing now: wait until the socket can
  ended,    // the other side ended it
  crowded   // too many descriptors are on their way: send the bytes instead
};
struct Moved {
  Move move = Move::blocked;
  size_t bytes = 0;
  int error = 0;  // of `ended`: 0 for a clean end
};

Moved receive_bytes(int descriptor, std::span<std::byte> into);
// The same, and the descriptor that came along, which is the caller's: -1 if none did, and
// kLostDescriptor if one did for which this process has no room.
inline constexpr int kLostDescriptor = -2;
Moved receive_bytes(int descriptor, std::span<std::byte> into, int* passed);
Moved send_bytes(int descriptor, std::span<const std::byte> bytes);
// `passed` goes with the first byte.
Moved send_bytes(int descriptor, std::span<const std::byte> bytes, int passed);

}  // namespace tenure::store
