// Transport: one connection as the client sees it: bytes, descriptors, and a deadline on all.
// Small, so that another wire can be added behind it.
//
// Threading: one thread at a time; at most one send and one receive pending. Torch-free.
#pragma once

#include <tenure/store/hello.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace tenure::store {

class TlsContext;

class Transport {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  Transport(Transport&&) = delete;
  Transport& operator=(Transport&&) = delete;
  virtual ~Transport() = default;

  // As much as can be moved now without waiting; 0 if nothing. Throws OwnerLost when the other
  // side has ended the connection. A receive may bring a descriptor along, which is the caller's.
  virtual size_t send_some(std::span<const std::byte> bytes) = 0;
  virtual size_t receive_some(std::span<std::byte> into, int* descriptor) = 0;

  // To poll() on, and for what (POLLIN for a receive, POLLOUT for a send, or what TLS wants).
  [[nodiscard]] virtual int descriptor() const = 0;
  [[nodiscard]] virtual short awaited(bool sending) const = 0;

  [[nodiscard]] virtual Wire wire() const = 0;
};

// Connected, and past the hello. Each throws OwnerLost (nobody there), StoreTimeout, AccessRefused.
struct Credentials {
  std::string job;
  Secret secret;
  // Shared by connections; null: plain TCP. NOLINTNEXTLINE(readability-redundant-member-init)
  std::shared_ptr<const TlsContext> tls{};
};
std::unique_ptr<Transport> connect_local(const std::string& path, const Credentials& who,
                                         Transport::Deadline deadline);
std::unique_ptr<Transport> connect_tcp(const std::string& address, uint16_t port,
                                       const Credentials& who, Transport::Deadline deadline);

}  // namespace tenure::store
