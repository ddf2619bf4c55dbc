// What is said over a connection after the hello. Each message is a frame: a header of fixed size,
// a body that is parsed, then for some kinds a payload of raw bytes that is not. Parsers accept
// what the encoders write and nothing else; every length is checked against a limit before anything
// is allocated. Torch-free. docs/store-protocol.md is this file in words.
#pragma once

#include <tenure/store/identity.h>
#include <tenure/store/layout.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tenure::store {

enum class MessageKind : uint8_t {
  // client -> server
  introduce = 1,  // the first one; answered by `welcome`
  fetch = 2,      // answered by an `object` or a `refusal` for each wish, in order, then `done`
  free = 3,       // answered by `freed`
  close = 4,      // answered by `closed`
  ask = 5,        // stats, a page of the list; answered by `text`
  same = 6,       // whether an object's content has this fingerprint; answered by `freed` (0 or 1)
  // on a connection for notices, unanswered
  fetched = 7,
  unmapped = 8,
  renew = 9,
  // server -> client
  welcome = 32,
  object = 33,
  refusal = 34,
  done = 35,
  freed = 36,
  closed = 37,
  text = 38,
  // on a connection for notices
  scope_closed = 39,
  withdrawn = 40,  // objects that were freed before their scope closed
};

inline constexpr size_t kHeaderBytes = 24;
inline constexpr uint32_t kMostBodyBytes = 4 << 20;
// Wishes in one fetch; ids in one free, fetched, unmapped, withdrawn.
inline constexpr size_t kMostWishes = 65'536;
inline constexpr size_t kWishBytes = 25;
inline constexpr size_t kMostWhyBytes = 4096;  // a longer reason is cut when it is encoded

// What a body of this kind can have at most: 0 for `renew` and `done`.
uint32_t most_body_bytes(MessageKind kind);

struct Header {
  MessageKind kind{};
  uint32_t body_bytes = 0;     // at most most_body_bytes(kind)
  uint64_t payload_bytes = 0;  // only `object` has any
};
// Throws InputError for a header that decode_header() would not take.
std::array<std::byte, kHeaderBytes> encode(const Header& header);
// None: not a header, another magic, an unknown kind, too long a body, a payload where none
// belongs.
std::optional<Header> decode_header(std::span<const std::byte, kHeaderBytes> bytes);

enum class Purpose : uint8_t { requests = 1, notices = 2 };
struct Introduce {
  std::string job;
  Member member;
  Purpose purpose = Purpose::requests;
};
struct Welcome {
  Member owner;
  uint32_t lease_ms = 0;
};
struct Wish {
  ObjectId id;
  Rows rows;
  bool copied = false;  // over a Unix socket: send the bytes, not a descriptor
};
struct Fetch {
  std::vector<Wish> wishes;
};
// The `wish`-th of the fetch. With payload_bytes in the header the bytes follow, all of `bytes`;
// without, a descriptor came with the frame and the part begins at `offset` in it.
struct ObjectFound {
  uint32_t wish = 0;
  Layout layout;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t whole_bytes = 0;  // of the whole object: the size that the descriptor must have
};
enum class RefusalKind : uint8_t {
  stale = 1,
  not_yours = 2,
  bad_input = 3,
  failed = 4,
  budget = 5
};
struct Refusal {
  uint32_t wish = 0;
  RefusalKind kind = RefusalKind::failed;
  std::string why;
};
struct Ids {  // of `free`, `fetched`, `unmapped`, `withdrawn`
  std::vector<ObjectId> ids;
};
struct Close {
  ScopeName scope;
};
struct FreedAnswer {
  uint64_t count = 0;
};
struct ClosedAnswer {
  uint64_t freed = 0;
  uint64_t bytes = 0;
  std::string difference;                 // of the account; empty if the books are right
  std::vector<std::string> still_mapped;  // "trainer 3 since 14:03:22: 2 objects, 64.0 MiB"
};
enum class Question : uint8_t { stats = 1, list = 2 };
struct Ask {
  Question question = Question::stats;
  uint32_t from = 0;  // of a list
  uint32_t most = 1000;
};
struct TextAnswer {
  std::string json;
  uint32_t next = 0;
};
struct Same {
  ObjectId id;
  std::array<std::byte, 16> fingerprint{};
};
struct ScopeClosed {
  ScopeName scope;
  Member by;
  int64_t at_ms = 0;
};

// Bodies. `renew` and `done` have none. Each throws InputError for what cannot be said: names that
// are none, too many wishes or ids, an object whose numbers contradict each other. Sentences are
// made prose (characters.h) and cut to their limits.
std::vector<std::byte> encode(const Introduce& message);
std::vector<std::byte> encode(const Welcome& message);
std::vector<std::byte> encode(const Fetch& message);
std::vector<std::byte> encode(const ObjectFound& message);
std::vector<std::byte> encode(const Refusal& message);
std::vector<std::byte> encode(const Ids& message);
std::vector<std::byte> encode(const Close& message);
std::vector<std::byte> encode(const FreedAnswer& message);
std::vector<std::byte> encode(const ClosedAnswer& message);
std::vector<std::byte> encode(const Ask& message);
std::vector<std::byte> encode(const TextAnswer& message);
std::vector<std::byte> encode(const Same& message);
std::vector<std::byte> encode(const ScopeClosed& message);

// Each throws InputError for a body that its encoder does not write.
Introduce decode_introduce(std::span<const std::byte> body);
Welcome decode_welcome(std::span<const std::byte> body);
Fetch decode_fetch(std::span<const std::byte> body);
ObjectFound decode_object(std::span<const std::byte> body);
Refusal decode_refusal(std::span<const std::byte> body);
Ids decode_ids(std::span<const std::byte> body);
Close decode_close(std::span<const std::byte> body);
FreedAnswer decode_freed(std::span<const std::byte> body);
ClosedAnswer decode_closed(std::span<const std::byte> body);
Ask decode_ask(std::span<const std::byte> body);
TextAnswer decode_text(std::span<const std::byte> body);
Same decode_same(std::span<const std::byte> body);
ScopeClosed decode_scope_closed(std::span<const std::byte> body);

}  // namespace tenure::store
