#include <tenure/store/handle.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/bytes.h>
#include <tenure/store/characters.h>
#include <tenure/store/forms.h>

#include <algorithm>
#include <array>
#include <utility>

namespace tenure::store {
namespace {

constexpr uint8_t kHandleVersion = 1;
constexpr size_t kMostUnstoredBytes = 512;
constexpr std::string_view kTextPrefix = "tenure1:";
constexpr std::string_view kWhat = "a store handle";

// The origins decoded last, by their bytes: the handles of a batch come from few owners. One for
// each thread, so that nothing waits and a forked child finds it whole.
class RecentOrigins {
 public:
  std::shared_ptr<const Origin> find(std::span<const std::byte> bytes) {
    const auto found = std::ranges::find_if(
        entries_, [&](const Entry& entry) { return std::ranges::equal(entry.bytes, bytes); });
    if (found == entries_.end() || !found->origin) {
      return nullptr;
    }
    std::rotate(entries_.begin(), found, found + 1);
    return entries_.front().origin;
  }

  void keep(std::span<const std::byte> bytes, std::shared_ptr<const Origin> origin) {
    std::rotate(entries_.begin(), entries_.end() - 1, entries_.end());
    entries_.front() = {.bytes = {bytes.begin(), bytes.end()}, .origin = std::move(origin)};
  }

 private:
  struct Entry {
    std::vector<std::byte> bytes;
    std::shared_ptr<const Origin> origin;
  };
  std::array<Entry, 8> entries_;
};

std::shared_ptr<const Origin> origin_of(std::span<const std::byte> bytes) {
  thread_local RecentOrigins recent;
  if (auto origin = recent.find(bytes)) {
    return origin;
  }
  ByteReader in(bytes, kWhat);
  auto origin = std::make_shared<const Origin>(read_origin(in));
  in.finish();
  recent.keep(bytes, origin);
  return origin;
}

constexpr std::string_view kDigits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

constexpr std::array<int8_t, 256> digit_values() {
  std::array<int8_t, 256> values{};
  values.fill(-1);
  for (size_t i = 0; i < kDigits.size(); ++i) {
    values[static_cast<uint8_t>(kDigits[i])] = static_cast<int8_t>(i);
  }
  return values;
}

constexpr auto kDigitValues = digit_values();

constexpr size_t digits_for(size_t bytes) { return (bytes * 8 + 5) / 6; }

void append_base64url(std::string& out, std::span<const std::byte> bytes) {
  uint32_t pending = 0;
  unsigned bits = 0;
  for (const std::byte byte : bytes) {
    pending = ((pending & 0xffU) << 8U) | std::to_integer<uint32_t>(byte);
    for (bits += 8; bits >= 6; bits -= 6) {
      out += kDigits[(pending >> (bits - 6)) & 0x3fU];
    }
  }
  if (bits > 0) {
    out += kDigits[(pending << (6 - bits)) & 0x3fU];
  }
}

[[noreturn]] void refuse_text(std::string_view why) {
  throw InputError(text(kWhat, " cannot be read from its text: ", why));
}

std::vector<std::byte> from_base64url(std::string_view digits) {
  std::vector<std::byte> bytes;
  bytes.reserve(digits.size() * 6 / 8);
  uint32_t pending = 0;
  unsigned bits = 0;
  for (const char digit : digits) {
    const int8_t value = kDigitValues[static_cast<uint8_t>(digit)];
    if (value < 0) {
      refuse_text("it has characters that are not of base64url");
    }
    pending = ((pending & 0xffU) << 6U) | static_cast<uint32_t>(value);
    bits += 6;
    if (bits >= 8) {
      bits -= 8;
      bytes.push_back(static_cast<std::byte>(pending >> bits));
    }
  }
  const uint32_t unused = pending & ((1U << bits) - 1);
  if (bits >= 6 || unused != 0) {
    refuse_text("its end was changed or cut");
  }
  return bytes;
}

}  // namespace

bool operator==(const Handle& a, const Handle& b) {
  const bool same_origin = a.origin == b.origin || (a.origin && b.origin && *a.origin == *b.origin);
  return same_origin && a.scope == b.scope && a.id == b.id && a.layout == b.layout &&
         a.unstored == b.unstored;
}

std::string handle_text(const Handle& handle) {
  const auto owner = handle.origin ? member_text(handle.origin->owner) : "nobody";
  const auto what = text(bytes_text(bytes_of(handle.layout)), ' ', layout_text(handle.layout),
                         " of ", owner, " in ", scope_text(handle.scope));
  return handle.stored() ? what : text(what, ", not stored: ", handle.unstored);
}

std::vector<std::byte> encode(const Handle& handle) {
  if (!handle.origin) {
    throw InputError("a store handle without an origin cannot be sent: put() makes whole ones");
  }
  ByteWriter origin(256);
  write(origin, *handle.origin);
  const auto origin_bytes = origin.take();
  ByteWriter out(256);
  out.u8(kHandleVersion);
  out.u16(static_cast<uint16_t>(origin_bytes.size()));
  out.raw(origin_bytes);
  write(out, handle.scope);
  write(out, handle.id);
  write(out, handle.layout);
  out.text(as_prose(handle.unstored, kMostUnstoredBytes));
  return out.take();
}

Handle decode_handle(std::span<const std::byte> bytes) {
  ByteReader in(bytes, kWhat);
  if (bytes.size() > kMostHandleBytes) {
    in.refuse(
        text("it has ", bytes.size(), " bytes, and at most ", kMostHandleBytes, " belong in one"));
  }
  const uint8_t version = in.u8();
  if (version != kHandleVersion) {
    in.refuse(text("it is of version ", int{version}, ", and this process reads version ",
                   int{kHandleVersion}));
  }
  Handle handle;
  handle.origin = origin_of(in.raw(in.u16()));
  handle.scope = read_scope(in);
  handle.id = read_id(in);
  handle.layout = read_layout(in);
  handle.unstored = in.prose(kMostUnstoredBytes);
  in.finish();
  return handle;
}

std::string to_text(const Handle& handle) {
  const auto bytes = encode(handle);
  std::string out(kTextPrefix);
  out.reserve(out.size() + digits_for(bytes.size()));
  append_base64url(out, bytes);
  return out;
}

Handle handle_from_text(std::string_view text) {
  if (!text.starts_with(kTextPrefix)) {
    refuse_text("it does not begin with 'tenure1:'");
  }
  text.remove_prefix(kTextPrefix.size());
  if (text.size() > digits_for(kMostHandleBytes)) {
    refuse_text("it is too long");
  }
  return decode_handle(from_base64url(text));
}

}  // namespace tenure::store
