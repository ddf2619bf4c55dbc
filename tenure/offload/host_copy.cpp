#include <tenure/offload/host_copy.h>

#include <tenure/core/hold.h>

#include <algorithm>

namespace tenure::offload {

HostCopy::HostCopy(const std::shared_ptr<HostPool>& pool, size_t bytes, OwnerId owner,
                   ScopeId scope, HostPool::Limit limit)
    : bytes_(bytes) {
  size_t missing = bytes;
  for (auto& piece : pool->take(bytes, limit)) {
    // The pool gives multiples of its alignment: the last piece counts as what it is used for.
    const size_t used = std::min(missing, piece.bytes);
    missing -= used;
    auto room = std::make_shared<Room>(Room{pool, std::move(piece)});
    auto data = std::make_unique<std::shared_ptr<Room>>(room);
    auto* address = room->piece.data;
    const c10::Storage storage(
        c10::Storage::use_byte_size_t(), used,
        c10::DataPtr(address, data.release(), &free_room, c10::Device(c10::DeviceType::CPU)),
        nullptr, false);
    parts_.push_back({std::move(room), hold(storage, owner, scope)});
  }
}

void HostCopy::free_room(void* room) {
  const std::unique_ptr<std::shared_ptr<Room>> last(static_cast<std::shared_ptr<Room>*>(room));
  (*last)->pool->give(std::move((*last)->piece));
}

void HostCopy::written_until(const Fence& fence) {
  for (auto& part : parts_) {
    auto& room = *part.room;
    room.piece.busy.out = fence;
    room.piece.busy.out_order = room.pool->next_order();
  }
}

void HostCopy::read_until(const Fence& fence) {
  for (auto& part : parts_) {
    auto& room = *part.room;
    room.piece.busy.back = fence;
    room.piece.busy.back_order = room.pool->next_order();
  }
}

}  // namespace tenure::offload
