// Sending: what is queued for one connection, and how it gets out: small things gathered into few
// writes, large ones straight from their file, descriptors with the first byte of their message.
// One thread at a time. Torch-free.
#pragma once

#include <tenure/store/content.h>
#include <tenure/store/messages.h>
#include <tenure/store/stream.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

namespace tenure::store {

class Sending {
 public:
  void push(std::vector<std::byte> bytes);
  // The answer to a wish. Its bytes go along, from memory or from the content's file.
  void push(const ObjectFound& found, std::shared_ptr<const Content> content);
  // The same with a descriptor in their place.
  void push_descriptor(ObjectId id, const ObjectFound& found,
                       std::shared_ptr<const Content> content);

  [[nodiscard]] bool empty() const { return queue_.empty(); }
  [[nodiscard]] uint64_t outstanding() const { return outstanding_; }  // bytes
  [[nodiscard]] uint64_t sent() const { return sent_; }                // since the start

  // Sends until nothing is left (`some`), the socket is full (`blocked`), the connection has ended,
  // or about `most` bytes have gone (`some`, and not empty()).
  Moved flush(Stream& stream, uint64_t most);

  // The objects whose descriptors have gone out since the last call.
  std::vector<ObjectId> take_passed();

 private:
  struct Parcel {
    std::vector<std::byte> head;  // header, body, and a payload that was copied
    std::shared_ptr<const Content> content;
    std::span<const std::byte> memory;  // a payload that lies in memory
    uint64_t offset = 0;                // of a payload in a file
    uint64_t bytes = 0;
    int passed = -1;  // goes with the first byte
    ObjectId id;
    ObjectFound found;  // of one with a descriptor
    size_t head_sent = 0;
    uint64_t payload_sent = 0;

    [[nodiscard]] uint64_t left() const {
      return head.size() - head_sent + memory.size() + bytes - payload_sent;
    }
  };

  void enqueue(Parcel parcel);
  Moved pass(Stream& stream, Parcel& parcel);
  Moved gather(Stream& stream);
  void consume(uint64_t count);

  std::deque<Parcel> queue_;
  std::vector<ObjectId> passed_;
  uint64_t outstanding_ = 0;
  uint64_t sent_ = 0;
};

}  // namespace tenure::store
