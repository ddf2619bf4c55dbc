// Stream: one accepted connection as the server sees it: bytes in, bytes, files and descriptors
// out, none of them waiting. Torch-free. One thread at a time.
#pragma once

#include <tenure/store/hello.h>
#include <tenure/store/socket.h>

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tenure::store {

class TlsContext;

class Stream {
 public:
  explicit Stream(Socket socket) : socket_(std::move(socket)) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  Stream(Stream&&) = delete;
  Stream& operator=(Stream&&) = delete;
  virtual ~Stream() = default;

  enum class Follows : uint8_t { nothing, more };  // more: of the same message, at once

  virtual Moved receive(std::span<std::byte> into) = 0;
  virtual Moved send(std::span<const iovec> pieces, Follows follows) = 0;
  // From a file, without a copy where the wire can. `ended` with an error also for a file that
  // cannot be read, and with none for one that is too short.
  virtual Moved send_file(int file, uint64_t offset, size_t bytes) = 0;
  // REQUIRES: wire() is local.
  virtual Moved pass(std::span<const std::byte> bytes, int descriptor) = 0;

  [[nodiscard]] virtual Wire wire() const = 0;
  [[nodiscard]] int descriptor() const { return socket_.get(); }

 private:
  Socket socket_;
};

std::unique_ptr<Stream> plain_stream(Socket socket, Wire wire);
// Of a connection whose other side is about to begin TLS.
std::unique_ptr<Stream> tls_stream(Socket socket, const TlsContext& context);

}  // namespace tenure::store
