#include <tenure/store/fingerprint.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace tenure::store {
namespace {

static_assert(std::endian::native == std::endian::little, "fingerprints travel between machines");

constexpr size_t kBlock = 64;
using Lanes = std::array<uint64_t, 8>;

// Odd numbers without a pattern: the first bits of the fractions of the roots of small primes.
constexpr Lanes kKeys{0x6a09e667f3bcc909, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                      0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                      0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

// Both halves of the product: every bit of it depends on most bits of `value`.
uint64_t fold(uint64_t value, uint64_t key) {
  const auto product = static_cast<unsigned __int128>(value) * key;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64U);
}

// A word goes into two lanes: multiplied into its own, which no word can undo that differs there
// alone, and added to another, so that a difference has to vanish from 128 bits. The halves of the
// product are not folded here: the upper half costs more than all the rest. Lanes do not wait for
// each other, so that a core multiplies for several at once; they stay in registers only if the
// eight steps are written out, which g++ does not do on its own at -O2.
template <size_t... kLane>
void absorb(Lanes& lanes, const std::byte* bytes, size_t blocks, std::index_sequence<kLane...>) {
  Lanes now = lanes;
  for (; blocks > 0; --blocks, bytes += kBlock) {
    Lanes words{};
    std::memcpy(words.data(), bytes, kBlock);
    const auto step = [&](size_t i) {
      const uint64_t product = (now[i] ^ words[i]) * kKeys[i];
      now[i] = (product ^ (product >> 29U)) + words[i ^ 4U];
    };
    (step(kLane), ...);
  }
  lanes = now;
}

void absorb(Lanes& lanes, const std::byte* bytes, size_t blocks) {
  absorb(lanes, bytes, blocks, std::make_index_sequence<8>{});
}

}  // namespace

Fingerprinter::Fingerprinter() : lanes_(kKeys) {}

void Fingerprinter::add(std::span<const std::byte> bytes) {
  const size_t waiting = bytes_ % kBlock;
  bytes_ += bytes.size();
  if (waiting > 0) {
    const size_t taken = std::min(kBlock - waiting, bytes.size());
    std::ranges::copy(bytes.first(taken), rest_.begin() + static_cast<ptrdiff_t>(waiting));
    bytes = bytes.subspan(taken);
    if (waiting + taken < kBlock) {
      return;
    }
    absorb(lanes_, rest_.data(), 1);
  }
  const size_t blocks = bytes.size() / kBlock;
  absorb(lanes_, bytes.data(), blocks);
  std::ranges::copy(bytes.subspan(blocks * kBlock), rest_.begin());
}

Fingerprint Fingerprinter::finish() const {
  Lanes lanes = lanes_;
  std::array<std::byte, kBlock> last{};
  std::copy_n(rest_.begin(), bytes_ % kBlock, last.begin());
  absorb(lanes, last.data(), 1);
  std::array<uint64_t, 2> halves{bytes_, ~bytes_};
  for (size_t i = 0; i < lanes.size(); ++i) {
    halves[0] = fold(halves[0] ^ lanes[i], kKeys[i]) + lanes[i];
    halves[1] = fold(halves[1] ^ lanes[7 - i], kKeys[i]) + std::rotl(lanes[7 - i], 32);
  }
  for (uint64_t& half : halves) {
    half = fold(half ^ kKeys[0], kKeys[1]);
  }
  return std::bit_cast<Fingerprint>(halves);
}

Fingerprint fingerprint(std::span<const std::byte> bytes) {
  Fingerprinter whole;
  whole.add(bytes);
  return whole.finish();
}

}  // namespace tenure::store
