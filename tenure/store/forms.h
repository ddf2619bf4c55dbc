// The bytes of the values that handles and messages share. Writers throw InputError for a value
// that cannot be, readers for bytes that no writer writes. Torch-free.
#pragma once

#include <tenure/store/bytes.h>
#include <tenure/store/identity.h>
#include <tenure/store/layout.h>

namespace tenure::store {

inline constexpr size_t kIdBytes = 8;

void write(ByteWriter& out, const Member& member);
void write(ByteWriter& out, const Origin& origin);
void write(ByteWriter& out, const ScopeName& scope);
void write(ByteWriter& out, ObjectId id);
void write(ByteWriter& out, const Layout& layout);

Member read_member(ByteReader& in);
Origin read_origin(ByteReader& in);
ScopeName read_scope(ByteReader& in);
ObjectId read_id(ByteReader& in);
Layout read_layout(ByteReader& in);

}  // namespace tenure::store
