#include <tenure/store/fetching.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/mapping.h>
#include <tenure/store/socket.h>

#include <algorithm>
#include <utility>

namespace tenure::store {
namespace {

[[noreturn]] void refuse_answer(const Route& route) {
  throw InputError(text(route_text(route), " answered what it was not asked"));
}

// Memory is made, and a mapping is read, by what the handle says.
void check_layout(const Want& want, const Layout& found) {
  const Layout& layout = want.handle->layout;
  const bool same =
      want.rows.all() ? found == layout : found == extent_of(layout, want.rows).layout;
  if (!same) {
    throw InputError(text(
        handle_text(*want.handle), " is not what its owner has under that id: ", layout_text(found),
        want.rows.all() ? "" : " of those rows", "; the handle was changed on its way"));
  }
}

}  // namespace

void Fetching::speak() {
  // Begun again: nothing of the batch has come.
  to_ask_.insert(to_ask_.begin(), batch_.begin(), batch_.end());
  batch_.clear();
  ask_next();
}

void Fetching::ask_next() {
  const size_t count = std::min(to_ask_.size(), kMostWishes);
  if (count == 0) {
    finished_ = true;
    return;
  }
  batch_.assign(to_ask_.begin(), to_ask_.begin() + static_cast<ptrdiff_t>(count));
  to_ask_.erase(to_ask_.begin(), to_ask_.begin() + static_cast<ptrdiff_t>(count));
  next_ = 0;
  Fetch fetch;
  fetch.wishes.reserve(count);
  for (const Asked& asked : batch_) {
    const Want& want = call_.wants[asked.want];
    fetch.wishes.push_back({.id = want.handle->id, .rows = want.rows, .copied = asked.copied});
  }
  say(MessageKind::fetch, encode(fetch));
}

std::byte* Fetching::hear(const Header& header, std::span<const std::byte> body) {
  switch (header.kind) {
    case MessageKind::object:
      return take_object(header, decode_object(body));
    case MessageKind::refusal: {
      Refusal refusal = decode_refusal(body);
      refused_.push_back({.want = answered(refusal.wish).want,
                          .kind = refusal.kind,
                          .why = std::move(refusal.why)});
      return nullptr;
    }
    case MessageKind::done:
      take_done();
      return nullptr;
    default:
      refuse_answer(route());
  }
}

const Fetching::Asked& Fetching::answered(uint32_t wish) {
  if (next_ >= batch_.size() || wish != next_) {
    refuse_answer(route());
  }
  return batch_[next_++];
}

std::byte* Fetching::take_object(const Header& header, const ObjectFound& found) {
  const Asked& asked = answered(found.wish);
  check_layout(call_.wants[asked.want], found.layout);
  Got& got = call_.gots[asked.want];
  got.layout = found.layout;
  got.bytes = found.bytes;
  if (header.payload_bytes == 0 && found.bytes > 0) {
    take_mapping(found);
    return nullptr;
  }
  if (header.payload_bytes != found.bytes) {
    refuse_answer(route());
  }
  std::byte* const room = call_.memory(asked.want, found.bytes);
  if (room == nullptr && found.bytes > 0) {
    throw InputError(
        text("no memory was given for ", handle_text(*call_.wants[asked.want].handle)));
  }
  return room;
}

void Fetching::take_mapping(const ObjectFound& found) {
  const Asked& asked = batch_[found.wish];
  auto descriptor = take_descriptor();
  if (descriptor.get() == kLostDescriptor) {
    again_.push_back({asked.want, true});
    return;
  }
  auto mapping = MappedFile::map(std::move(descriptor), found);
  if (!mapping) {
    again_.push_back({asked.want, true});
    return;
  }
  call_.gots[asked.want].mapping = std::move(mapping);
}

// Note [Lent], connection.cpp: before this the owner takes back what it lent by itself.
void Fetching::take_done() {
  if (next_ != batch_.size()) {
    refuse_answer(route());
  }
  for (const Asked& asked : batch_) {
    if (auto& mapping = call_.gots[asked.want].mapping) {
      MappedFile::set_tell(*mapping, call_.unmapped(*call_.wants[asked.want].handle));
    }
  }
  for (const Asked& asked : again_) {
    call_.unmapped (*call_.wants[asked.want].handle)({});
  }
  to_ask_.insert(to_ask_.end(), again_.begin(), again_.end());
  again_.clear();
  batch_.clear();
  rest();
  ask_next();
}

}  // namespace tenure::store
