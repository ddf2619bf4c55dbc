// Segments: large contents, each in a memfd of its own, which other processes map.
//
// Note [A segment is filled by write() and never used twice]
// A fresh memfd is filled by write(), in large pieces: 2.5 GB/s where mapping it and copying gives
// 0.55, for write() takes no fault for each page. Then it is sealed against writing, growing and
// shrinking, so that whoever maps it can rely on it. A segment that is let go is closed and never
// filled again, though a warm one would fill several times as fast: a consumer that still maps it
// would see the new bytes. Its pages go back to the system when the last map of them does.
//
// Torch-free. Threading: any thread.
#pragma once

#include <tenure/store/content.h>
#include <tenure/store/room.h>
#include <tenure/store/source.h>

#include <cstdint>
#include <memory>

namespace tenure::store {

// What a segment of `bytes` takes: whole pages.
uint64_t segment_bytes(uint64_t bytes);

// Null if there is no descriptor left for it (some are left to sockets and files): then nothing is
// taken from the source, and the charge stays the caller's. Throws BudgetError if the kernel has no
// memory for it, and what the source throws.
std::shared_ptr<const Content> make_segment(const Source& source, Charge& charge);

}  // namespace tenure::store
