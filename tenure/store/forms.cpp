#include <tenure/store/forms.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <bit>

namespace tenure::store {
namespace {

// What a check says about a value that was read is the reason to refuse its bytes.
template <class Check>
void refuse_unless(const ByteReader& in, const Check& check) {
  try {
    check();
  } catch (const InputError& error) {
    in.refuse(error.what());
  }
}

}  // namespace

void write(ByteWriter& out, const Member& member) {
  check_member(member);
  out.text(member.role);
  out.u32(std::bit_cast<uint32_t>(member.rank));
  out.u64(member.incarnation);
}

Member read_member(ByteReader& in) {
  Member member;
  member.role = in.line(kMostRoleBytes);
  member.rank = std::bit_cast<int32_t>(in.u32());
  member.incarnation = in.u64();
  refuse_unless(in, [&] { check_member(member); });
  return member;
}

void write(ByteWriter& out, const Origin& origin) {
  check_origin(origin);
  out.text(origin.job);
  write(out, origin.owner);
  out.raw(origin.host.boot);
  out.u64(origin.host.network);
  out.u32(origin.host.user);
  out.text(origin.path);
  out.text(origin.address);
  out.u16(origin.port);
}

Origin read_origin(ByteReader& in) {
  Origin origin;
  origin.job = in.line(kMostJobBytes);
  origin.owner = read_member(in);
  in.raw(origin.host.boot);
  origin.host.network = in.u64();
  origin.host.user = in.u32();
  origin.path = in.line(kMostPathBytes);
  origin.address = in.line(kMostAddressBytes);
  origin.port = in.u16();
  refuse_unless(in, [&] { check_origin(origin); });
  return origin;
}

void write(ByteWriter& out, const ScopeName& scope) {
  check_scope(scope);
  out.text(scope.kind);
  out.text(scope.id);
}

ScopeName read_scope(ByteReader& in) {
  ScopeName scope;
  scope.kind = in.line(kMostScopeKindBytes);
  scope.id = in.line(kMostScopeIdBytes);
  refuse_unless(in, [&] { check_scope(scope); });
  return scope;
}

void write(ByteWriter& out, ObjectId id) {
  out.u32(id.slot);
  out.u32(id.generation);
}

ObjectId read_id(ByteReader& in) {
  ObjectId id;
  id.slot = in.u32();
  id.generation = in.u32();
  return id;
}

void write(ByteWriter& out, const Layout& layout) {
  bytes_of(layout);
  out.u8(static_cast<uint8_t>(layout.dtype));
  out.u8(static_cast<uint8_t>(layout.shape.size()));
  for (const int64_t size : layout.shape) {
    out.u64(std::bit_cast<uint64_t>(size));
  }
}

Layout read_layout(ByteReader& in) {
  Layout layout;
  const uint8_t dtype = in.u8();
  if (dtype == 0 || dtype > kLastDtype) {
    in.refuse(text("dtype ", int{dtype}, " is unknown to this version"));
  }
  layout.dtype = static_cast<Dtype>(dtype);
  const uint8_t dimensions = in.u8();
  if (dimensions > kMostDimensions) {
    in.refuse(text("it says that a tensor has ", int{dimensions}, " dimensions"));
  }
  if (in.left() < dimensions * sizeof(uint64_t)) {
    in.refuse("it ends too early");
  }
  layout.shape.resize(dimensions);
  for (int64_t& size : layout.shape) {
    size = std::bit_cast<int64_t>(in.u64());
  }
  refuse_unless(in, [&] { bytes_of(layout); });
  return layout;
}

}  // namespace tenure::store
