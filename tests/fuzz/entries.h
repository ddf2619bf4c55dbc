// What a fuzzer does with an input, and a test with what the fuzzers kept. Each answers what is
// wrong, or nothing: whatever is read must be written back as the same bytes, and what is refused
// is refused with InputError alone. Torch-free.
#pragma once

#include <tenure/core/error.h>
#include <tenure/store/characters.h>
#include <tenure/store/handle.h>
#include <tenure/store/hello.h>
#include <tenure/store/messages.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tenure::store::fuzz {

using Input = std::span<const std::byte>;

inline std::string_view characters_of(Input input) {
  return {reinterpret_cast<const char*>(input.data()), input.size()};
}

template <class Decode>
std::string body_fault(Input body, const Decode& decode) {
  std::vector<std::byte> again;
  try {
    again = encode(decode(body));
  } catch (const InputError&) {
    return {};
  }
  return std::ranges::equal(again, body) ? "" : "a body was read and is written otherwise";
}

inline std::string body_fault(MessageKind kind, Input body) {
  switch (kind) {
    case MessageKind::introduce:
      return body_fault(body, decode_introduce);
    case MessageKind::fetch:
      return body_fault(body, decode_fetch);
    case MessageKind::free:
    case MessageKind::fetched:
    case MessageKind::unmapped:
    case MessageKind::withdrawn:
      return body_fault(body, decode_ids);
    case MessageKind::close:
      return body_fault(body, decode_close);
    case MessageKind::ask:
      return body_fault(body, decode_ask);
    case MessageKind::same:
      return body_fault(body, decode_same);
    case MessageKind::welcome:
      return body_fault(body, decode_welcome);
    case MessageKind::object:
      return body_fault(body, decode_object);
    case MessageKind::refusal:
      return body_fault(body, decode_refusal);
    case MessageKind::freed:
      return body_fault(body, decode_freed);
    case MessageKind::closed:
      return body_fault(body, decode_closed);
    case MessageKind::text:
      return body_fault(body, decode_text);
    case MessageKind::scope_closed:
      return body_fault(body, decode_scope_closed);
    case MessageKind::renew:
    case MessageKind::done:
      return {};
  }
  return {};
}

// Frames one after the other, as a connection brings them; the last one may be cut.
inline std::string frame_fault(Input input) {
  while (input.size() >= kHeaderBytes) {
    const auto front = input.first<kHeaderBytes>();
    const auto header = decode_header(front);
    if (!header) {
      break;
    }
    if (!std::ranges::equal(encode(*header), front)) {
      return "a header was read and is written otherwise";
    }
    input = input.subspan(kHeaderBytes);
    const auto body = input.first(std::min<size_t>(header->body_bytes, input.size()));
    if (auto fault = body_fault(header->kind, body); !fault.empty()) {
      return fault;
    }
    input = input.subspan(body.size());
    input = input.subspan(std::min<uint64_t>(header->payload_bytes, input.size()));
  }
  const auto prose = as_prose(characters_of(input), input.size());
  if (!is_prose(prose)) {
    return "what was made prose is none";
  }
  return is_prose(characters_of(input)) && prose != characters_of(input) ? "prose was changed" : "";
}

inline std::string handle_text_fault(std::string_view text) {
  std::optional<Handle> handle;
  try {
    handle = handle_from_text(text);
  } catch (const InputError&) {
    return {};
  }
  return to_text(*handle) == text ? "" : "a handle's text was read and is written otherwise";
}

// The bytes as a handle, and as the text of one.
inline std::string handle_fault(Input input) {
  if (auto fault = handle_text_fault(characters_of(input)); !fault.empty()) {
    return fault;
  }
  std::optional<Handle> handle;
  try {
    handle = decode_handle(input);
  } catch (const InputError&) {
    return {};
  }
  if (!std::ranges::equal(encode(*handle), input)) {
    return "a handle was read and is written otherwise";
  }
  if (handle_text(*handle).empty() || handle_from_text(to_text(*handle)) != *handle) {
    return "a handle's text does not bring it back";
  }
  return {};
}

// Of another version only magic and version are read.
template <class Said>
std::string hello_fault(const std::optional<Said>& said, Input front) {
  constexpr size_t kMagicAndVersion = 10;
  if (!said) {
    return {};
  }
  const size_t read = said->version == kProtocolVersion ? front.size() : kMagicAndVersion;
  const auto again = encode(*said);
  return std::ranges::equal(std::span(again).first(read), front.first(read))
             ? ""
             : "a hello or an answer was read and is written otherwise";
}

inline std::string hello_fault(Input input) {
  if (input.size() < kHelloBytes) {
    return {};
  }
  const auto hello = input.first<kHelloBytes>();
  if (auto fault = hello_fault(decode_hello(hello), hello); !fault.empty()) {
    return fault;
  }
  const auto answer = input.last<kAnswerBytes>();
  return hello_fault(decode_answer(answer), answer);
}

}  // namespace tenure::store::fuzz
