// TLS 1.3 over a connected socket: both sides show a certificate that the job's authority signed.
// Names in certificates are not compared with hosts: the authority is the job's own. Torch-free;
// without OpenSSL (TENURE_HAVE_OPENSSL 0) tls_context() throws tenure::Error.
#pragma once

#include <tenure/store/hello.h>
#include <tenure/store/socket.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tenure::store {

struct TlsFiles {
  std::string certificate;  // PEM, of this process
  std::string key;          // PEM
  std::string authority;    // PEM: who signed the others'
};

// What the connections of a process share. Any thread.
class TlsContext;
// Throws InputError, naming the file, for one that cannot be used.
std::shared_ptr<const TlsContext> tls_context(const TlsFiles& files);

// One connection. The handshake is part of the first send or receive. One thread at a time; the
// descriptor does not block, and stays the caller's.
class TlsSession {
 public:
  TlsSession(const TlsContext& context, int descriptor, Side side);
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;
  TlsSession(TlsSession&&) = delete;
  TlsSession& operator=(TlsSession&&) = delete;
  ~TlsSession();

  // Whether the handshake is over.
  [[nodiscard]] bool is_begun() const;
  // As of a plain socket. After a blocked send, the next one begins with the same bytes. `ended`
  // with EPROTO: TLS failed, and failure() says why.
  Moved receive(std::span<std::byte> into);
  Moved send(std::span<const std::byte> bytes);
  // What to poll() for before the next one.
  [[nodiscard]] short awaited(bool sending) const;
  [[nodiscard]] const std::string& failure() const { return failure_; }

 private:
  struct State;
  Moved moved(int result, short* awaited);

  std::unique_ptr<State> state_;
  short awaited_receiving_;
  short awaited_sending_;
  std::string failure_;
};

}  // namespace tenure::store
