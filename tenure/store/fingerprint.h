// A 128-bit fingerprint of bytes: not against forgery, but two different contents do not meet by
// accident. About as fast as memory. The same on every machine and in every version that speaks
// the same protocol. Torch-free. Threading: a Fingerprinter from one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tenure::store {

using Fingerprint = std::array<std::byte, 16>;
// In a question for the same content: any will do, if only the object is live.
inline constexpr Fingerprint kAnyFingerprint{};

class Fingerprinter {
 public:
  Fingerprinter();

  // The same bytes have the same fingerprint however they are split over calls.
  void add(std::span<const std::byte> bytes);
  [[nodiscard]] Fingerprint finish() const;

 private:
  std::array<uint64_t, 8> lanes_;
  std::array<std::byte, 64> rest_{};  // the bytes that do not fill a block yet
  uint64_t bytes_ = 0;
};

Fingerprint fingerprint(std::span<const std::byte> bytes);

}  // namespace tenure::store
