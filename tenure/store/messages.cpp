#include <tenure/store/messages.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/bytes.h>
#include <tenure/store/forms.h>

#include <algorithm>

namespace tenure::store {
namespace {

// "tens"
constexpr uint32_t kFrameMagic = 0x736e6574;
// More than the names and numbers of any message that is not a list or a text.
constexpr uint32_t kMostShortBytes = 1024;

bool is_kind(uint8_t number) {
  return (number >= static_cast<uint8_t>(MessageKind::introduce) &&
          number <= static_cast<uint8_t>(MessageKind::renew)) ||
         (number >= static_cast<uint8_t>(MessageKind::welcome) &&
          number <= static_cast<uint8_t>(MessageKind::withdrawn));
}

bool is_header(const Header& header) {
  return is_kind(static_cast<uint8_t>(header.kind)) &&
         header.body_bytes <= most_body_bytes(header.kind) &&
         header.payload_bytes <= kMostObjectBytes &&
         (header.payload_bytes == 0 || header.kind == MessageKind::object);
}

}  // namespace

uint32_t most_body_bytes(MessageKind kind) {
  switch (kind) {
    case MessageKind::fetch:
      return 4 + kMostWishes * kWishBytes;
    case MessageKind::free:
    case MessageKind::fetched:
    case MessageKind::unmapped:
    case MessageKind::withdrawn:
      return 4 + kMostWishes * kIdBytes;
    case MessageKind::renew:
    case MessageKind::done:
      return 0;
    case MessageKind::refusal:
      return 8 + kMostWhyBytes;
    case MessageKind::closed:
    case MessageKind::text:
      return kMostBodyBytes;
    default:
      return kMostShortBytes;
  }
}

std::array<std::byte, kHeaderBytes> encode(const Header& header) {
  if (!is_header(header)) {
    throw InputError(text("a store message of kind ", static_cast<int>(header.kind), " with ",
                          header.body_bytes, " bytes of body and ", header.payload_bytes,
                          " of payload cannot be sent: it exceeds the protocol's limits"));
  }
  ByteWriter out(kHeaderBytes);
  out.u32(kFrameMagic);
  out.u8(static_cast<uint8_t>(header.kind));
  out.u8(0);
  out.u16(0);
  out.u32(header.body_bytes);
  out.u32(0);
  out.u64(header.payload_bytes);
  std::array<std::byte, kHeaderBytes> bytes{};
  std::ranges::copy(out.take(), bytes.begin());
  return bytes;
}

std::optional<Header> decode_header(std::span<const std::byte, kHeaderBytes> bytes) {
  ByteReader in(bytes, "a header");
  const bool ours = in.u32() == kFrameMagic;
  Header header;
  header.kind = static_cast<MessageKind>(in.u8());
  const bool empty_before = in.u8() == 0 && in.u16() == 0;
  header.body_bytes = in.u32();
  const bool empty_after = in.u32() == 0;
  header.payload_bytes = in.u64();
  if (!ours || !empty_before || !empty_after || !is_header(header)) {
    return std::nullopt;
  }
  return header;
}

}  // namespace tenure::store
