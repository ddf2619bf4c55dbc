#include <tenure/store/hello.h>

#include <tenure/config.h>
#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace tenure::store {
namespace {

template <size_t kBytes>
std::array<std::byte, kBytes> counted(uint8_t first) {
  std::array<std::byte, kBytes> bytes{};
  std::ranges::generate(bytes, [&] { return static_cast<std::byte>(first++); });
  return bytes;
}

Hello hello() {
  return {.version = kProtocolVersion,
          .wire = Wire::tcp,
          .job = counted<32>(1),
          .nonce = counted<32>(101)};
}

Answer answer() {
  return {.version = kProtocolVersion,
          .verdict = Verdict::welcome,
          .nonce = counted<32>(1),
          .proof = counted<32>(101)};
}

TEST(Hello, ComesBack) {
  for (const Wire wire : {Wire::local, Wire::tcp, Wire::tls}) {
    Hello said = hello();
    said.wire = wire;
    const auto back = decode_hello(encode(said));
    ASSERT_TRUE(back);
    EXPECT_EQ(back->version, kProtocolVersion);
    EXPECT_EQ(back->wire, wire);
    EXPECT_EQ(back->job, said.job);
    EXPECT_EQ(back->nonce, said.nonce);
  }
}

TEST(Hello, AnAnswerComesBack) {
  for (const Verdict verdict : {Verdict::welcome, Verdict::other_version, Verdict::other_job,
                                Verdict::full, Verdict::refused, Verdict::no_descriptors}) {
    Answer said = answer();
    said.verdict = verdict;
    const auto back = decode_answer(encode(said));
    ASSERT_TRUE(back);
    EXPECT_EQ(back->version, kProtocolVersion);
    EXPECT_EQ(back->verdict, verdict);
    EXPECT_EQ(back->nonce, said.nonce);
    EXPECT_EQ(back->proof, said.proof);
  }
}

// `front` is what is read of another version: magic and version.
template <class Decode>
void expect_one_spelling_of_hello(const auto& whole, const Decode& decode) {
  constexpr size_t kFront = 10;
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int flip = 1; flip < 256; ++flip) {
      auto changed = whole;
      changed[at] ^= static_cast<std::byte>(flip);
      const auto back = decode(changed);
      if (!back) {
        continue;
      }
      const auto again = encode(*back);
      const size_t read = back->version == kProtocolVersion ? whole.size() : kFront;
      ASSERT_TRUE(
          std::equal(again.begin(), again.begin() + static_cast<ptrdiff_t>(read), changed.begin()))
          << "byte " << at << " changed by " << flip;
    }
  }
}

TEST(Hello, HasOneSpelling) {
  expect_one_spelling_of_hello(encode(hello()), [](const auto& b) { return decode_hello(b); });
}

TEST(Hello, AnAnswerHasOneSpelling) {
  expect_one_spelling_of_hello(encode(answer()), [](const auto& b) { return decode_answer(b); });
}

TEST(Hello, OfAnotherProtocolIsNone) {
  std::array<std::byte, kHelloBytes> bytes{};
  EXPECT_FALSE(decode_hello(bytes));
  const std::string_view http = "GET / HTTP/1.1\r\nHost: example\r\n\r\n";
  std::ranges::copy(std::as_bytes(std::span(http)), bytes.begin());
  EXPECT_FALSE(decode_hello(bytes));
  EXPECT_FALSE(decode_answer(bytes));
}

TEST(Hello, OfVersionZeroIsNone) {
  Hello said = hello();
  said.version = 0;
  EXPECT_FALSE(decode_hello(encode(said)));
}

TEST(Hello, OfAnotherVersionIsReadAsFarAsTheVersion) {
  auto bytes = encode(hello());
  bytes[8] = std::byte{0x02};
  bytes[9] = std::byte{0x01};
  std::fill(bytes.begin() + 10, bytes.end(), std::byte{0xff});
  const auto back = decode_hello(bytes);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->version, 0x0102);
  EXPECT_EQ(back->nonce, Nonce{});
}

TEST(Hello, AnAnswerOfAnotherVersionIsARefusal) {
  auto bytes = encode(answer());
  bytes[8] = std::byte{0x02};
  const auto back = decode_answer(bytes);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->version, 2);
  EXPECT_EQ(back->verdict, Verdict::other_version);
  EXPECT_EQ(back->proof, Digest{});
}

TEST(Hello, DigestsAreComparedWhole) {
  const Digest a = counted<32>(1);
  EXPECT_TRUE(equal(a, a));
  for (size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    b[i] ^= std::byte{0x80};
    EXPECT_FALSE(equal(a, b)) << i;
  }
}

#if TENURE_HAVE_OPENSSL

constexpr std::string_view kHexDigits = "0123456789abcdef";

std::string hex(std::span<const std::byte> bytes) {
  std::string out;
  for (const std::byte byte : bytes) {
    out += kHexDigits[std::to_integer<size_t>(byte >> 4U)];
    out += kHexDigits[std::to_integer<size_t>(byte & std::byte{15})];
  }
  return out;
}

std::string hmac_text(std::string_view key, std::string_view message) {
  return hex(hmac_sha256(key, std::as_bytes(std::span(message))));
}

// RFC 4231, section 4.
TEST(Hello, HmacIsThatOfTheStandard) {
  EXPECT_EQ(hmac_text(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hmac_text("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac_text(std::string(20, '\xaa'), std::string(50, '\xdd')),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(
      hmac_text(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hmac_text(std::string(131, '\xaa'),
                      "This is a test using a larger than block-size key and a larger than "
                      "block-size data. The key needs to be hashed before being used by the "
                      "HMAC algorithm."),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

// FIPS 180-2, appendix B.
TEST(Hello, AJobIsKnownByItsSha256) {
  EXPECT_EQ(hex(job_digest("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(job_digest("")),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(Hello, NoncesDiffer) {
  std::set<Nonce> seen;
  for (int i = 0; i < 1000; ++i) {
    seen.insert(new_nonce());
  }
  EXPECT_EQ(seen.size(), 1000);
}

TEST(Hello, AProofIsOfEverythingThatWasSaid) {
  const Secret secret("0123456789abcdef");
  const Nonce theirs = counted<32>(77);
  const auto with = [&](auto change) {
    Hello said = hello();
    change(said);
    return proof_of(secret, Side::client, said, theirs);
  };
  Nonce other = theirs;
  other[31] ^= std::byte{1};
  const std::vector<Digest> proofs{
      with([](Hello&) {}),
      with([](Hello& h) { h.wire = Wire::tls; }),
      with([](Hello& h) { h.version = 2; }),
      with([](Hello& h) { h.job[0] ^= std::byte{1}; }),
      with([](Hello& h) { h.nonce[31] ^= std::byte{1}; }),
      proof_of(secret, Side::server, hello(), theirs),
      proof_of(secret, Side::client, hello(), other),
      proof_of(Secret("0123456789abcdeg"), Side::client, hello(), theirs),
  };
  EXPECT_EQ(std::set<Digest>(proofs.begin(), proofs.end()).size(), proofs.size());
}

TEST(Hello, AProofIsNotThatOfTheNoncesTheOtherWayRound) {
  const Secret secret("0123456789abcdef");
  Hello reflected = hello();
  reflected.nonce = counted<32>(77);
  EXPECT_NE(proof_of(secret, Side::client, hello(), counted<32>(77)),
            proof_of(secret, Side::client, reflected, hello().nonce));
}

// Another client computes the same: docs/store-protocol.md has these bytes.
TEST(Hello, AProofIsWhatItAlwaysWas) {
  EXPECT_EQ(hex(proof_of(Secret("0123456789abcdef"), Side::client, hello(), counted<32>(77))),
            "58ad7b2019fd2e72cd4f4f0459a36736d909b49c754bbb9c526214573d102861");
}

TEST(Hello, WithoutASecretNothingIsProven) {
  EXPECT_THROW(proof_of(Secret(), Side::client, hello(), Nonce{}), InputError);
}

#else

TEST(Hello, WithoutOpenSslTheErrorSaysWhatIsMissing) {
  EXPECT_THROW(new_nonce(), Error);
  EXPECT_THROW(job_digest("job"), Error);
  EXPECT_THROW(proof_of(Secret("0123456789abcdef"), Side::client, hello(), Nonce{}), Error);
}

#endif

}  // namespace
}  // namespace tenure::store
