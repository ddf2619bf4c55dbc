// Handle: a tensor that another process has, as plain data. It travels through any RPC; it keeps
// nothing alive and owns nothing. Torch-free. Values: any thread, as usual for values.
#pragma once

#include <tenure/store/identity.h>
#include <tenure/store/layout.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tenure::store {

struct Handle {
  // Never null. Shared by the handles of an owner: there may be a million of them.
  std::shared_ptr<const Origin> origin;
  ScopeName scope;
  ObjectId id;
  Layout layout;
  // Empty if the object is stored. Otherwise why it is not: "nobody collects it".
  std::string unstored;

  [[nodiscard]] bool stored() const { return unstored.empty(); }
};

// Equal if every field is, origins by value.
bool operator==(const Handle& a, const Handle& b);

// "64.0 MiB float32 [4096, 4096] of trainer 3 in step 168"
std::string handle_text(const Handle& handle);

inline constexpr size_t kMostHandleBytes = 4096;

// The binary form, with a version in front; `unstored` is cut to 512 bytes. decode() throws
// InputError for anything that encode() does not write: it is what arrives from strangers. Equal
// origins that a thread decodes one after the other are one.
std::vector<std::byte> encode(const Handle& handle);
Handle decode_handle(std::span<const std::byte> bytes);

// The same in base64url with "tenure1:" in front: for JSON, logs and command lines.
std::string to_text(const Handle& handle);
Handle handle_from_text(std::string_view text);

}  // namespace tenure::store
