#include <tenure/store/hello.h>

#include <tenure/config.h>
#include <tenure/core/error.h>
#include <tenure/store/bytes.h>

#if TENURE_HAVE_OPENSSL
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>
#endif

#include <algorithm>
#include <memory>

namespace tenure::store {
namespace {

// Eight bytes that no text protocol begins with.
constexpr std::array<uint8_t, 8> kHelloMagic{'t', 'e', 'n', 'u', 'r', 'e', 0x00, 0xd5};
constexpr size_t kUnused = 5;
// Nothing else that is signed with the secret begins so.
constexpr std::string_view kLabel = "tenure store proof";

void write_front(ByteWriter& out, uint16_t version, uint8_t number) {
  out.raw(std::as_bytes(std::span(kHelloMagic)));
  out.u16(version);
  out.u8(number);
  out.raw(std::array<std::byte, kUnused>{});
}

struct Front {
  uint16_t version = 0;
  uint8_t number = 0;  // of the wire or the verdict, 0 if of another version
};

// None: another magic, no version, or unused bytes that are used in our version.
std::optional<Front> read_front(ByteReader& in) {
  const bool ours =
      std::ranges::equal(in.raw(kHelloMagic.size()), std::as_bytes(std::span(kHelloMagic)));
  Front front;
  front.version = in.u16();
  if (!ours || front.version == 0) {
    return std::nullopt;
  }
  if (front.version != kProtocolVersion) {
    return front;
  }
  front.number = in.u8();
  const auto unused = in.raw(kUnused);
  const bool empty = std::ranges::all_of(unused, [](std::byte b) { return b == std::byte{0}; });
  return empty ? std::optional(front) : std::nullopt;
}

template <size_t kBytes>
std::array<std::byte, kBytes> whole(ByteWriter& out) {
  std::array<std::byte, kBytes> bytes{};
  std::ranges::copy(out.take(), bytes.begin());
  return bytes;
}

#if TENURE_HAVE_OPENSSL

struct Free {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};

const unsigned char* as_chars(std::string_view bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

unsigned char* as_chars(Digest& digest) { return reinterpret_cast<unsigned char*>(digest.data()); }

Digest hmac(std::string_view key, std::span<const std::byte> message) {
  const std::unique_ptr<EVP_PKEY, Free> held(
      EVP_PKEY_new_raw_private_key(EVP_PKEY_HMAC, nullptr, as_chars(key), key.size()));
  const std::unique_ptr<EVP_MD_CTX, Free> context(EVP_MD_CTX_new());
  Digest digest{};
  size_t length = digest.size();
  const bool done =
      held && context &&
      EVP_DigestSignInit(context.get(), nullptr, EVP_sha256(), nullptr, held.get()) == 1 &&
      EVP_DigestSign(context.get(), as_chars(digest), &length,
                     reinterpret_cast<const unsigned char*>(message.data()), message.size()) == 1;
  if (!done || length != digest.size()) {
    throw Error("OpenSSL could not compute an HMAC-SHA256: its configuration may forbid it");
  }
  return digest;
}

#else

[[noreturn]] void refuse_without_openssl() {
  throw Error(
      "this build of Tenure has no OpenSSL, which the store needs to show who comes in: "
      "build it where OpenSSL's headers are (Debian: libssl-dev)");
}

#endif

}  // namespace

std::array<std::byte, kHelloBytes> encode(const Hello& hello) {
  ByteWriter out(kHelloBytes);
  write_front(out, hello.version, static_cast<uint8_t>(hello.wire));
  out.raw(hello.job);
  out.raw(hello.nonce);
  return whole<kHelloBytes>(out);
}

std::array<std::byte, kAnswerBytes> encode(const Answer& answer) {
  ByteWriter out(kAnswerBytes);
  write_front(out, answer.version, static_cast<uint8_t>(answer.verdict));
  out.raw(answer.nonce);
  out.raw(answer.proof);
  return whole<kAnswerBytes>(out);
}

std::optional<Hello> decode_hello(std::span<const std::byte, kHelloBytes> bytes) {
  ByteReader in(bytes, "a hello");
  const auto front = read_front(in);
  if (!front) {
    return std::nullopt;
  }
  Hello hello;
  hello.version = front->version;
  if (hello.version != kProtocolVersion) {
    return hello;
  }
  if (front->number == 0 || front->number > static_cast<uint8_t>(Wire::tls)) {
    return std::nullopt;
  }
  hello.wire = static_cast<Wire>(front->number);
  in.raw(hello.job);
  in.raw(hello.nonce);
  return hello;
}

std::optional<Answer> decode_answer(std::span<const std::byte, kAnswerBytes> bytes) {
  ByteReader in(bytes, "an answer to a hello");
  const auto front = read_front(in);
  if (!front) {
    return std::nullopt;
  }
  Answer answer;
  answer.version = front->version;
  if (answer.version != kProtocolVersion) {
    answer.verdict = Verdict::other_version;
    return answer;
  }
  if (front->number == 0 || front->number > static_cast<uint8_t>(Verdict::no_descriptors)) {
    return std::nullopt;
  }
  answer.verdict = static_cast<Verdict>(front->number);
  in.raw(answer.nonce);
  in.raw(answer.proof);
  return answer;
}

Nonce new_nonce() {
#if TENURE_HAVE_OPENSSL
  Nonce nonce{};
  if (RAND_bytes(as_chars(nonce), static_cast<int>(nonce.size())) != 1) {
    throw Error("OpenSSL has no random numbers: the system's source of them may be missing");
  }
  return nonce;
#else
  refuse_without_openssl();
#endif
}

Digest job_digest([[maybe_unused]] std::string_view job) {
#if TENURE_HAVE_OPENSSL
  Digest digest{};
  unsigned int length = 0;
  if (EVP_Digest(job.data(), job.size(), as_chars(digest), &length, EVP_sha256(), nullptr) != 1 ||
      length != digest.size()) {
    throw Error("OpenSSL could not compute a SHA-256: its configuration may forbid it");
  }
  return digest;
#else
  refuse_without_openssl();
#endif
}

Digest hmac_sha256([[maybe_unused]] std::string_view key,
                   [[maybe_unused]] std::span<const std::byte> message) {
#if TENURE_HAVE_OPENSSL
  return hmac(key, message);
#else
  refuse_without_openssl();
#endif
}

Digest proof_of(const Secret& secret, Side side, const Hello& hello, const Nonce& server_nonce) {
  if (secret.empty()) {
    throw InputError("the store has no secret to prove: give a file or the environment's");
  }
  ByteWriter out(128);
  out.text(kLabel);
  out.u8(static_cast<uint8_t>(side));
  out.u8(static_cast<uint8_t>(hello.wire));
  out.u16(hello.version);
  out.raw(hello.job);
  out.raw(hello.nonce);
  out.raw(server_nonce);
  return hmac_sha256(secret.bytes(), out.take());
}

bool equal(const Digest& a, const Digest& b) {
#if TENURE_HAVE_OPENSSL
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
#else
  uint8_t different = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    different |= std::to_integer<uint8_t>(a[i] ^ b[i]);
  }
  return different == 0;
#endif
}

}  // namespace tenure::store
