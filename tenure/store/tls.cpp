#include <tenure/store/tls.h>

#include <tenure/config.h>
#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>
#include <utility>

#if TENURE_HAVE_OPENSSL
#include <openssl/err.h>
#include <openssl/ssl.h>
#endif

namespace tenure::store {

#if TENURE_HAVE_OPENSSL

namespace {

using Context = std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)>;

// The oldest error of this thread, which is the one that the others follow from.
std::string last_error() {
  const auto code = ERR_get_error();
  ERR_clear_error();
  if (code == 0) {
    return "no reason is given";
  }
  std::array<char, 256> said{};
  ERR_error_string_n(code, said.data(), said.size());
  const char* const reason = ERR_reason_error_string(code);
  return reason != nullptr ? reason : said.data();
}

int descriptor_of(BIO* bio) {
  return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio)));
}

// A socket below OpenSSL. Its own one writes without MSG_NOSIGNAL, which ends a program whose peer
// is gone.
int write_bytes(BIO* bio, const char* bytes, size_t count, size_t* sent) {
  BIO_clear_retry_flags(bio);
  const auto moved = send_bytes(descriptor_of(bio), std::as_bytes(std::span(bytes, count)));
  if (moved.move == Move::some) {
    *sent = moved.bytes;
    return 1;
  }
  if (moved.move == Move::blocked) {
    BIO_set_retry_write(bio);
  }
  errno = moved.error;
  return 0;
}

int read_bytes(BIO* bio, char* into, size_t count, size_t* got) {
  BIO_clear_retry_flags(bio);
  const auto moved =
      receive_bytes(descriptor_of(bio), std::as_writable_bytes(std::span(into, count)));
  if (moved.move == Move::some) {
    *got = moved.bytes;
    return 1;
  }
  if (moved.move == Move::blocked) {
    BIO_set_retry_read(bio);
  } else if (moved.error == 0) {
    BIO_set_flags(bio, BIO_FLAGS_IN_EOF);
  }
  errno = moved.error;
  return 0;
}

long control(BIO* bio, int what, long /*number*/, void* /*pointer*/) {
  if (what == BIO_CTRL_EOF) {
    return BIO_test_flags(bio, BIO_FLAGS_IN_EOF) != 0 ? 1 : 0;
  }
  return what == BIO_CTRL_FLUSH ? 1 : 0;
}

const BIO_METHOD* socket_method() {
  static const BIO_METHOD* const method = [] {
    auto* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "tenure socket");
    if (made == nullptr) {
      throw Error(text("TLS cannot be set up: ", last_error()));
    }
    BIO_meth_set_write_ex(made, write_bytes);
    BIO_meth_set_read_ex(made, read_bytes);
    BIO_meth_set_ctrl(made, control);
    return made;
  }();
  return method;
}

void need(int done, std::string_view what, const std::string& file) {
  if (done != 1) {
    throw InputError(text("the ", what, " in ", file, " cannot be used: ", last_error()));
  }
}

}  // namespace

class TlsContext {
 public:
  explicit TlsContext(Context made) : context_(std::move(made)) {}
  [[nodiscard]] SSL_CTX* get() const { return context_.get(); }

 private:
  Context context_;
};

std::shared_ptr<const TlsContext> tls_context(const TlsFiles& files) {
  Context context(SSL_CTX_new(TLS_method()), SSL_CTX_free);
  if (!context) {
    throw Error(text("TLS cannot be set up: ", last_error()));
  }
  SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
#ifdef SSL_OP_IGNORE_UNEXPECTED_EOF
  // A process that is killed says no goodbye. Frames say their length: what is cut short is seen.
  SSL_CTX_set_options(context.get(), SSL_OP_IGNORE_UNEXPECTED_EOF);
#endif
  // Nothing may come on an idle connection, and nobody comes back to a session.
  SSL_CTX_set_num_tickets(context.get(), 0);
  need(SSL_CTX_use_certificate_chain_file(context.get(), files.certificate.c_str()), "certificate",
       files.certificate);
  need(SSL_CTX_use_PrivateKey_file(context.get(), files.key.c_str(), SSL_FILETYPE_PEM), "key",
       files.key);
  need(SSL_CTX_check_private_key(context.get()), "key", files.key);
  need(SSL_CTX_load_verify_locations(context.get(), files.authority.c_str(), nullptr), "authority",
       files.authority);
  return std::make_shared<const TlsContext>(std::move(context));
}

struct TlsSession::State {
  std::unique_ptr<SSL, decltype(&SSL_free)> ssl;
};

TlsSession::TlsSession(const TlsContext& context, int descriptor, Side side)
    : state_(std::make_unique<State>(State{{SSL_new(context.get()), SSL_free}})),
      awaited_receiving_(POLLIN),
      awaited_sending_(POLLOUT) {
  auto* const ssl = state_->ssl.get();
  auto* const bio = ssl == nullptr ? nullptr : BIO_new(socket_method());
  if (bio == nullptr) {
    throw Error(text("TLS cannot be begun: ", last_error()));
  }
  // NOLINTNEXTLINE(performance-no-int-to-ptr): a number, carried where OpenSSL has room for one
  BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)));
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl, bio, bio);
  if (side == Side::server) {
    SSL_set_accept_state(ssl);
  } else {
    SSL_set_connect_state(ssl);
  }
}

TlsSession::~TlsSession() = default;

Moved TlsSession::moved(int result, short* awaited) {
  const int saved = errno;
  switch (SSL_get_error(state_->ssl.get(), result)) {
    case SSL_ERROR_WANT_READ:
      *awaited = POLLIN;
      return {Move::blocked, 0, 0};
    case SSL_ERROR_WANT_WRITE:
      *awaited = POLLOUT;
      return {Move::blocked, 0, 0};
    case SSL_ERROR_ZERO_RETURN:
      return {Move::ended, 0, 0};
    case SSL_ERROR_SYSCALL:
      ERR_clear_error();
      return {Move::ended, 0, saved};
    default:
      failure_ = last_error();
      return {Move::ended, 0, EPROTO};
  }
}

bool TlsSession::is_begun() const { return SSL_is_init_finished(state_->ssl.get()) == 1; }

Moved TlsSession::receive(std::span<std::byte> into) {
  ERR_clear_error();
  size_t got = 0;
  awaited_receiving_ = POLLIN;
  const int result = SSL_read_ex(state_->ssl.get(), into.data(), into.size(), &got);
  return result == 1 ? Moved{Move::some, got, 0} : moved(result, &awaited_receiving_);
}

Moved TlsSession::send(std::span<const std::byte> bytes) {
  ERR_clear_error();
  size_t sent = 0;
  awaited_sending_ = POLLOUT;
  const int result = SSL_write_ex(state_->ssl.get(), bytes.data(), bytes.size(), &sent);
  return result == 1 ? Moved{Move::some, sent, 0} : moved(result, &awaited_sending_);
}

#else

class TlsContext {};
struct TlsSession::State {};

std::shared_ptr<const TlsContext> tls_context(const TlsFiles& /*files*/) {
  throw Error("this build of Tenure has no TLS: it was built without OpenSSL (libssl-dev)");
}
TlsSession::TlsSession(const TlsContext& /*context*/, int /*descriptor*/, Side /*side*/)
    : awaited_receiving_(POLLIN), awaited_sending_(POLLOUT) {}
TlsSession::~TlsSession() = default;
bool TlsSession::is_begun() const { return false; }
Moved TlsSession::receive(std::span<std::byte> /*into*/) { return {Move::ended, 0, EPROTO}; }
Moved TlsSession::send(std::span<const std::byte> /*bytes*/) { return {Move::ended, 0, EPROTO}; }

#endif

short TlsSession::awaited(bool sending) const {
  return sending ? awaited_sending_ : awaited_receiving_;
}

}  // namespace tenure::store
