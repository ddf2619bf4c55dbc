#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/bytes.h>
#include <tenure/store/characters.h>
#include <tenure/store/forms.h>
#include <tenure/store/messages.h>

#include <algorithm>
#include <bit>
#include <string_view>

namespace tenure::store {
namespace {

constexpr size_t kMostDifferenceBytes = 64 << 10;
constexpr size_t kMostMappedLines = 4096;
constexpr size_t kMostMappedLineBytes = 512;
constexpr size_t kMostJsonBytes = kMostBodyBytes - 8;

template <class Enum>
Enum read_enum(ByteReader& in, Enum last) {
  const uint8_t number = in.u8();
  if (number == 0 || number > static_cast<uint8_t>(last)) {
    in.refuse(text("it has a number that means nothing: ", int{number}));
  }
  return static_cast<Enum>(number);
}

void check_count(std::string_view what, size_t count) {
  if (count > kMostWishes) {
    throw InputError(
        text(count, ' ', what, " do not fit into one message of the store: at most ", kMostWishes));
  }
}

// Empty if all is well.
std::string fault_of(const ObjectFound& found) {
  if (found.wish >= kMostWishes) {
    return text("it answers wish ", found.wish, " of a fetch that has at most ", kMostWishes);
  }
  if (bytes_of(found.layout) != found.bytes) {
    return text(found.bytes, " bytes are not those of ", layout_text(found.layout));
  }
  if (found.whole_bytes > kMostObjectBytes || found.bytes > found.whole_bytes ||
      found.offset > found.whole_bytes - found.bytes) {
    return text(found.bytes, " bytes at ", found.offset, " are not inside an object of ",
                found.whole_bytes);
  }
  return {};
}

}  // namespace

std::vector<std::byte> encode(const Introduce& message) {
  check_job(message.job);
  ByteWriter out(256);
  out.text(message.job);
  write(out, message.member);
  out.u8(static_cast<uint8_t>(message.purpose));
  return out.take();
}

Introduce decode_introduce(std::span<const std::byte> body) {
  ByteReader in(body, "an introduction");
  Introduce message;
  message.job = in.line(kMostJobBytes);
  if (message.job.empty()) {
    in.refuse("it names no job");
  }
  message.member = read_member(in);
  message.purpose = read_enum(in, Purpose::notices);
  in.finish();
  return message;
}

std::vector<std::byte> encode(const Welcome& message) {
  ByteWriter out(128);
  write(out, message.owner);
  out.u32(message.lease_ms);
  return out.take();
}

Welcome decode_welcome(std::span<const std::byte> body) {
  ByteReader in(body, "a welcome");
  Welcome message;
  message.owner = read_member(in);
  message.lease_ms = in.u32();
  in.finish();
  return message;
}

std::vector<std::byte> encode(const Fetch& message) {
  check_count("wishes", message.wishes.size());
  ByteWriter out(4 + message.wishes.size() * kWishBytes);
  out.u32(static_cast<uint32_t>(message.wishes.size()));
  for (const Wish& wish : message.wishes) {
    write(out, wish.id);
    out.u64(wish.rows.first);
    out.u64(wish.rows.count);
    out.u8(wish.copied ? 1 : 0);
  }
  return out.take();
}

Fetch decode_fetch(std::span<const std::byte> body) {
  ByteReader in(body, "a fetch");
  Fetch message;
  message.wishes.resize(in.count(kMostWishes, kWishBytes));
  for (Wish& wish : message.wishes) {
    wish.id = read_id(in);
    wish.rows.first = in.u64();
    wish.rows.count = in.u64();
    wish.copied = in.flag();
  }
  in.finish();
  return message;
}

std::vector<std::byte> encode(const ObjectFound& message) {
  if (const auto fault = fault_of(message); !fault.empty()) {
    throw InputError(text("an object cannot be sent: ", fault));
  }
  ByteWriter out(64);
  out.u32(message.wish);
  write(out, message.layout);
  out.u64(message.offset);
  out.u64(message.bytes);
  out.u64(message.whole_bytes);
  return out.take();
}

ObjectFound decode_object(std::span<const std::byte> body) {
  ByteReader in(body, "an object");
  ObjectFound message;
  message.wish = in.u32();
  message.layout = read_layout(in);
  message.offset = in.u64();
  message.bytes = in.u64();
  message.whole_bytes = in.u64();
  in.finish();
  if (const auto fault = fault_of(message); !fault.empty()) {
    in.refuse(fault);
  }
  return message;
}

std::vector<std::byte> encode(const Refusal& message) {
  ByteWriter out(64 + message.why.size());
  out.u32(message.wish);
  out.u8(static_cast<uint8_t>(message.kind));
  out.text(as_prose(message.why, kMostWhyBytes));
  return out.take();
}

Refusal decode_refusal(std::span<const std::byte> body) {
  ByteReader in(body, "a refusal");
  Refusal message;
  message.wish = in.u32();
  message.kind = read_enum(in, RefusalKind::budget);
  message.why = in.prose(kMostWhyBytes);
  in.finish();
  return message;
}

std::vector<std::byte> encode(const Ids& message) {
  check_count("ids", message.ids.size());
  ByteWriter out(4 + message.ids.size() * kIdBytes);
  out.u32(static_cast<uint32_t>(message.ids.size()));
  for (const ObjectId id : message.ids) {
    write(out, id);
  }
  return out.take();
}

Ids decode_ids(std::span<const std::byte> body) {
  ByteReader in(body, "a list of objects");
  Ids message;
  message.ids.resize(in.count(kMostWishes, kIdBytes));
  std::ranges::generate(message.ids, [&] { return read_id(in); });
  in.finish();
  return message;
}

std::vector<std::byte> encode(const Close& message) {
  ByteWriter out(64);
  write(out, message.scope);
  return out.take();
}

Close decode_close(std::span<const std::byte> body) {
  ByteReader in(body, "a close");
  Close message{.scope = read_scope(in)};
  in.finish();
  return message;
}

std::vector<std::byte> encode(const FreedAnswer& message) {
  ByteWriter out(8);
  out.u64(message.count);
  return out.take();
}

FreedAnswer decode_freed(std::span<const std::byte> body) {
  ByteReader in(body, "an answer to free");
  const FreedAnswer message{.count = in.u64()};
  in.finish();
  return message;
}

std::vector<std::byte> encode(const ClosedAnswer& message) {
  const size_t lines = message.still_mapped.size();
  const size_t told = lines <= kMostMappedLines ? lines : kMostMappedLines - 1;
  ByteWriter out(256);
  out.u64(message.freed);
  out.u64(message.bytes);
  out.long_text(as_prose(message.difference, kMostDifferenceBytes));
  out.u32(static_cast<uint32_t>(told < lines ? told + 1 : told));
  for (size_t i = 0; i < told; ++i) {
    out.text(as_prose(message.still_mapped[i], kMostMappedLineBytes));
  }
  if (told < lines) {
    out.text(text("and ", lines - told, " more"));
  }
  return out.take();
}

ClosedAnswer decode_closed(std::span<const std::byte> body) {
  ByteReader in(body, "an answer to close");
  ClosedAnswer message;
  message.freed = in.u64();
  message.bytes = in.u64();
  message.difference = in.long_prose(kMostDifferenceBytes);
  message.still_mapped.resize(in.count(kMostMappedLines, 2));
  for (std::string& line : message.still_mapped) {
    line = in.prose(kMostMappedLineBytes);
  }
  in.finish();
  return message;
}

std::vector<std::byte> encode(const Ask& message) {
  ByteWriter out(9);
  out.u8(static_cast<uint8_t>(message.question));
  out.u32(message.from);
  out.u32(message.most);
  return out.take();
}

Ask decode_ask(std::span<const std::byte> body) {
  ByteReader in(body, "a question");
  Ask message;
  message.question = read_enum(in, Question::list);
  message.from = in.u32();
  message.most = in.u32();
  in.finish();
  return message;
}

std::vector<std::byte> encode(const TextAnswer& message) {
  if (message.json.size() > kMostJsonBytes) {
    throw InputError(text("an answer of ", bytes_text(message.json.size()), " cannot be sent: at ",
                          "most ", bytes_text(kMostBodyBytes), ". Ask for fewer at a time"));
  }
  ByteWriter out(8 + message.json.size());
  out.u32(message.next);
  out.long_text(as_prose(message.json, kMostJsonBytes));
  return out.take();
}

TextAnswer decode_text(std::span<const std::byte> body) {
  ByteReader in(body, "an answer");
  TextAnswer message;
  message.next = in.u32();
  message.json = in.long_prose(kMostJsonBytes);
  in.finish();
  return message;
}

std::vector<std::byte> encode(const Same& message) {
  ByteWriter out(kIdBytes + message.fingerprint.size());
  write(out, message.id);
  out.raw(message.fingerprint);
  return out.take();
}

Same decode_same(std::span<const std::byte> body) {
  ByteReader in(body, "a comparison");
  Same message;
  message.id = read_id(in);
  in.raw(message.fingerprint);
  in.finish();
  return message;
}

std::vector<std::byte> encode(const ScopeClosed& message) {
  ByteWriter out(128);
  write(out, message.scope);
  write(out, message.by);
  out.u64(std::bit_cast<uint64_t>(message.at_ms));
  return out.take();
}

ScopeClosed decode_scope_closed(std::span<const std::byte> body) {
  ByteReader in(body, "a notice of a closed scope");
  ScopeClosed message;
  message.scope = read_scope(in);
  message.by = read_member(in);
  message.at_ms = std::bit_cast<int64_t>(in.u64());
  in.finish();
  return message;
}

}  // namespace tenure::store
