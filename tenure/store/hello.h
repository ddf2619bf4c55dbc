// The first bytes of a connection, of fixed size, before anything else is parsed. Both sides say
// the version and the job; over TCP both prove that they know the job's secret, each over both
// nonces, so that neither a recorded proof nor one's own reflected is worth anything. Over a Unix
// socket the kernel says who the other is (SO_PEERCRED), and proofs are zero.
//
//   client -> server   Hello     (kHelloBytes)
//   server -> client   Answer    (kAnswerBytes)   with the server's proof, or why it refuses
//   client -> server   Proof     (kProofBytes)    over TCP only
//
// Torch-free.
#pragma once

#include <tenure/store/secret.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace tenure::store {

inline constexpr uint16_t kProtocolVersion = 1;

using Nonce = std::array<std::byte, 32>;
using Digest = std::array<std::byte, 32>;

enum class Wire : uint8_t { local = 1, tcp = 2, tls = 3 };

inline constexpr size_t kHelloBytes = 80;
struct Hello {
  uint16_t version = kProtocolVersion;
  Wire wire = Wire::local;
  Digest job{};  // SHA-256 of the job's name
  Nonce nonce{};
};

enum class Verdict : uint8_t {
  welcome = 1,
  other_version = 2,
  other_job = 3,
  full = 4,
  refused = 5,
  no_descriptors = 6  // for another connection
};

inline constexpr size_t kAnswerBytes = 80;
struct Answer {
  uint16_t version = kProtocolVersion;
  Verdict verdict = Verdict::welcome;
  Nonce nonce{};
  Digest proof{};
};

inline constexpr size_t kProofBytes = 32;

std::array<std::byte, kHelloBytes> encode(const Hello& hello);
std::array<std::byte, kAnswerBytes> encode(const Answer& answer);
// None: not of this protocol at all. Another version is decoded as far as its version, with a
// verdict of other_version in an answer.
std::optional<Hello> decode_hello(std::span<const std::byte, kHelloBytes> bytes);
std::optional<Answer> decode_answer(std::span<const std::byte, kAnswerBytes> bytes);

// --- with OpenSSL's libcrypto; without it (TENURE_HAVE_OPENSSL 0) they throw tenure::Error -------

Nonce new_nonce();
Digest job_digest(std::string_view job);

enum class Side : uint8_t { client = 1, server = 2 };
// HMAC-SHA256 over side, wire, version, job and both nonces. Throws InputError for an empty secret.
Digest proof_of(const Secret& secret, Side side, const Hello& hello, const Nonce& server_nonce);
Digest hmac_sha256(std::string_view key, std::span<const std::byte> message);
// In constant time, with or without OpenSSL.
bool equal(const Digest& a, const Digest& b);

}  // namespace tenure::store
