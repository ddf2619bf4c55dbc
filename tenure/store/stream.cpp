#include <tenure/store/stream.h>

#include <tenure/store/tls.h>

#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

namespace tenure::store {
namespace {

class PlainStream final : public Stream {
 public:
  PlainStream(Socket socket, Wire wire) : Stream(std::move(socket)), wire_(wire) {}

  Moved receive(std::span<std::byte> into) override { return receive_bytes(descriptor(), into); }

  Moved send(std::span<const iovec> pieces, Follows follows) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces.data());
    message.msg_iovlen = pieces.size();
    const int more = follows == Follows::more ? MSG_MORE : 0;
    return moved(::sendmsg(descriptor(), &message, MSG_DONTWAIT | MSG_NOSIGNAL | more));
  }

  Moved send_file(int file, uint64_t offset, size_t bytes) override {
    auto at = static_cast<off_t>(offset);
    const ssize_t sent = ::sendfile(descriptor(), file, &at, bytes);
    if (sent == 0) {
      return {Move::ended, 0, 0};
    }
    return moved(sent);
  }

  Moved pass(std::span<const std::byte> bytes, int passed) override {
    return send_bytes(descriptor(), bytes, passed);
  }

  [[nodiscard]] Wire wire() const override { return wire_; }

 private:
  static Moved moved(ssize_t sent) {
    if (sent >= 0) {
      return {Move::some, static_cast<size_t>(sent), 0};
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
      return {Move::blocked, 0, 0};
    }
    return {Move::ended, 0, errno};
  }

  Wire wire_;
};

constexpr size_t kTlsPiece = 64 << 10;  // sent at once

class TlsStream final : public Stream {
 public:
  TlsStream(Socket socket, const TlsContext& context)
      : Stream(std::move(socket)), session_(context, descriptor(), Side::server) {}

  Moved receive(std::span<std::byte> into) override { return session_.receive(into); }

  // Gathered, so that small messages are not a record each.
  Moved send(std::span<const iovec> pieces, Follows /*follows*/) override {
    piece_.clear();
    for (const auto& piece : pieces) {
      const auto room = kTlsPiece - piece_.size();
      const auto* const bytes = static_cast<const std::byte*>(piece.iov_base);
      piece_.insert(piece_.end(), bytes, bytes + std::min(room, piece.iov_len));
    }
    return session_.send(piece_);
  }

  Moved send_file(int file, uint64_t offset, size_t bytes) override {
    piece_.resize(std::min(bytes, kTlsPiece));
    const ssize_t got = ::pread(file, piece_.data(), piece_.size(), static_cast<off_t>(offset));
    if (got <= 0) {
      return {Move::ended, 0, got == 0 ? 0 : errno};
    }
    return session_.send(std::span(piece_).first(static_cast<size_t>(got)));
  }

  Moved pass(std::span<const std::byte> /*bytes*/, int /*passed*/) override {
    return {Move::ended, 0, EPROTO};
  }

  [[nodiscard]] Wire wire() const override { return Wire::tls; }

 private:
  TlsSession session_;
  std::vector<std::byte> piece_;
};

}  // namespace

std::unique_ptr<Stream> tls_stream(Socket socket, const TlsContext& context) {
  return std::make_unique<TlsStream>(std::move(socket), context);
}

std::unique_ptr<Stream> plain_stream(Socket socket, Wire wire) {
  return std::make_unique<PlainStream>(std::move(socket), wire);
}

}  // namespace tenure::store
