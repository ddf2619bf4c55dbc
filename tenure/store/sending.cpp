#include <tenure/store/sending.h>

#include <tenure/store/frame.h>

#include <algorithm>
#include <array>
#include <utility>

namespace tenure::store {
namespace {

constexpr uint64_t kFilePiece = 4 << 20;  // so that one connection does not keep the thread
constexpr size_t kCopied = 64 << 10;      // a payload of a file up to this is gathered with others

}  // namespace

void Sending::enqueue(Parcel parcel) {
  outstanding_ += parcel.left();
  queue_.push_back(std::move(parcel));
}

void Sending::push(std::vector<std::byte> bytes) {
  Parcel parcel;
  parcel.head = std::move(bytes);
  enqueue(std::move(parcel));
}

void Sending::push(const ObjectFound& found, std::shared_ptr<const Content> content) {
  Parcel parcel;
  const auto body = encode(found);
  const auto memory = content->memory();
  const bool copied = memory.empty() && (found.bytes <= kCopied || content->file() < 0);
  parcel.head.reserve(kHeaderBytes + body.size() + (copied ? found.bytes : 0));
  append_frame(parcel.head, MessageKind::object, body, found.bytes);
  if (found.bytes == 0) {
    return enqueue(std::move(parcel));
  }
  if (copied) {
    const size_t front = parcel.head.size();
    parcel.head.resize(front + found.bytes);
    content->read(found.offset, std::span(parcel.head).subspan(front));
    return enqueue(std::move(parcel));
  }
  if (!memory.empty()) {
    parcel.memory = memory.subspan(found.offset, found.bytes);
  } else {
    parcel.offset = found.offset;
    parcel.bytes = found.bytes;
  }
  parcel.content = std::move(content);
  enqueue(std::move(parcel));
}

void Sending::push_descriptor(ObjectId id, const ObjectFound& found,
                              std::shared_ptr<const Content> content) {
  Parcel parcel;
  parcel.head = frame(MessageKind::object, encode(found));
  parcel.passed = content->descriptor();
  parcel.id = id;
  parcel.found = found;
  parcel.content = std::move(content);
  enqueue(std::move(parcel));
}

std::vector<ObjectId> Sending::take_passed() { return std::exchange(passed_, {}); }

Moved Sending::flush(Stream& stream, uint64_t most) {
  const uint64_t before = sent_;
  while (!queue_.empty() && sent_ - before < most) {
    Parcel& front = queue_.front();
    Moved moved;
    if (front.passed >= 0) {
      moved = pass(stream, front);
      if (moved.move == Move::crowded) {
        continue;
      }
    } else if (front.head_sent < front.head.size() || !front.memory.empty()) {
      moved = gather(stream);
    } else {
      moved = stream.send_file(front.content->file(), front.offset + front.payload_sent,
                               std::min(front.bytes - front.payload_sent, kFilePiece));
    }
    if (moved.move != Move::some) {
      return moved;
    }
    consume(moved.bytes);
  }
  return {Move::some, static_cast<size_t>(sent_ - before), 0};
}

Moved Sending::pass(Stream& stream, Parcel& parcel) {
  const Moved moved = stream.pass(parcel.head, parcel.passed);
  if (moved.move == Move::some) {
    passed_.push_back(parcel.id);
    parcel.passed = -1;
  } else if (moved.move == Move::crowded) {
    outstanding_ -= parcel.left();
    parcel.passed = -1;
    parcel.head = frame(MessageKind::object, encode(parcel.found), parcel.found.bytes);
    parcel.offset = parcel.found.offset;
    parcel.bytes = parcel.found.bytes;
    outstanding_ += parcel.left();
  }
  return moved;
}

Moved Sending::gather(Stream& stream) {
  std::array<iovec, 256> pieces;  // filled as far as `count`
  size_t count = 0;
  auto follows = Stream::Follows::nothing;
  const auto add = [&](std::span<const std::byte> bytes) {
    if (!bytes.empty()) {
      pieces[count++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};
    }
  };
  for (const Parcel& parcel : queue_) {
    if (parcel.passed >= 0 || count + 2 > pieces.size()) {
      break;
    }
    add(std::span(parcel.head).subspan(parcel.head_sent));
    add(parcel.memory.subspan(parcel.memory.empty() ? 0 : parcel.payload_sent));
    if (parcel.bytes > 0) {
      follows = Stream::Follows::more;
      break;
    }
  }
  return stream.send(std::span(pieces).first(count), follows);
}

void Sending::consume(uint64_t count) {
  sent_ += count;
  outstanding_ -= count;
  while (count > 0) {
    Parcel& front = queue_.front();
    const uint64_t of_head = std::min<uint64_t>(count, front.head.size() - front.head_sent);
    front.head_sent += of_head;
    count -= of_head;
    const uint64_t payload = front.memory.size() + front.bytes;
    const uint64_t of_payload = std::min(count, payload - front.payload_sent);
    front.payload_sent += of_payload;
    count -= of_payload;
    if (front.left() > 0) {
      return;
    }
    queue_.pop_front();
  }
}

}  // namespace tenure::store
