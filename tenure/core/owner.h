// Owner: who keeps a storage alive, and why. Interned, so an owner costs 4 bytes in a lease and in
// an event. Any thread may call.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tenure {

// What the storage is to its owner. The order is the order of reports.
enum class OwnerKind : uint8_t {
  parameter,
  gradient,
  optimizer,
  activation,
  host_copy,
  receive_buffer,
  communication,
  stored_object,
  workspace,
  user,
};
inline constexpr size_t kOwnerKinds = 10;

std::string_view kind_name(OwnerKind kind);
// Throws InputError listing the kinds there are.
OwnerKind kind_named(std::string_view name);

// Kind in the top byte, index below it: the kind is known without a lookup.
enum class OwnerId : uint32_t {};
constexpr OwnerKind kind_of(OwnerId id) {
  return static_cast<OwnerKind>(static_cast<uint32_t>(id) >> 24);
}

struct Owner {
  OwnerKind kind;
  std::string name;  // "layers.3.mlp"
  std::string site;  // "train.py:41", or empty
};

// Equal owners have equal ids. Throws InputError for a name that check_name refuses; a site too
// long for a report keeps its end.
OwnerId intern_owner(OwnerKind kind, std::string_view name, std::string_view site = {});

// Throws InputError for an id that was never given.
Owner owner_of(OwnerId id);

// "activation 'layers.3.mlp' (train.py:41)"
std::string owner_text(OwnerId id);

}  // namespace tenure
