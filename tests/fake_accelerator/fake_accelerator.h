// A fake accelerator for tests: two devices of type PrivateUse1, named "fake", over host memory.
// What a GPU does by chance it does on command: streams are first-in-first-out queues that a test
// may hold, step and shuffle, so that a missing fence is seen as wrong data, every time.
//
//   install();
//   auto side = new_stream();
//   hold(side);                                    // the device is slow on this stream
//   { c10::StreamGuard guard(side); x.copy_(pinned, /*non_blocking=*/true); }
//   x.cpu();                                       // old data: nobody waited for `side`
//   release(side);
//   x.cpu();                                       // new data
//
// What is delayed: copies, event records and waits, and what `enqueue` and `launch_memset` put on
// a stream. Compute runs on the CPU when it is called: it first runs whatever its device's current
// stream still has queued, held or not, and with it what that work waits for on other streams, up
// to the awaited event and no further: so compute sees what a kernel behind those fences would see.
// Whatever makes the host wait on a GPU (`item`, `cpu`, a blocking copy, synchronize) does the
// same. So nothing in here can deadlock, and a held stream never blocks a host thread.
//
// As on CUDA: a copy between device and pinned memory with non_blocking=true is queued and keeps
// nobody's memory alive; one from pageable memory reads its source at once; one into pageable
// memory makes the host wait; copies between devices make each device's current stream wait for
// the other's. Each thread has its own current device and streams; backward runs on a thread of the
// device, on the streams of the forward.
//
// What it cannot do: convolutions, autocast, torch.load onto the device, random generators of its
// own (the CPU's is used), life in a forked child.
//
// Threading: every function may be called from any thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace at {
class Tensor;
}

namespace fake_accelerator {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline constexpr c10::DeviceIndex kDeviceCount = 2;
inline constexpr unsigned char kPoison = 0xFB;

// Registers the device with torch, for the life of the process; later calls do nothing.
void install();

// Back to the state after install(): nothing queued or held, in order, default memory policy, cache
// empty, peaks and waits forgotten. Live tensors stay. For the end of every test.
void reset();

// --- streams ---------------------------------------------------------------------------------

// A stream that nobody else has: unlike CUDA's, they are not taken from a pool of 32.
c10::Stream new_stream(c10::DeviceIndex device = 0);

// While a stream is held, its work queues up; release runs it, as far as its waits allow.
void hold(c10::Stream stream);
void release(c10::Stream stream);

// Runs the next `items` of a stream, held or not, and says how many: fewer where the queue ends or
// reaches a wait for an event that is not ready.
size_t advance(c10::Stream stream, size_t items = 1);

bool held(c10::Stream stream);
size_t pending(c10::Stream stream);

// From now on what is queued on streams that are not held runs late and in a random order, the same
// for the same seed where one thread queues: each enqueue and each query of an event or stream
// gives randomly chosen streams a turn. Order within a stream and waits are kept.
void shuffle(uint64_t seed);
void run_in_order();

// Puts `work` on a stream: a kernel of one's own. It runs on whichever thread makes the stream
// advance, under the fake's lock: it must not use fake tensors, this header or the GIL.
void enqueue(c10::Stream stream, std::function<void()> work);

// Puts a kernel that sets every byte of `tensor` on its device's current stream. REQUIRES a fake
// tensor whose elements are dense in memory. Like a real kernel it keeps nothing alive.
void launch_memset(const at::Tensor& tensor, unsigned char byte);

// How often something waited, since reset().
struct Waits {
  uint64_t host = 0;    // a host thread waited: it would have stalled on a GPU
  uint64_t forced = 0;  // an item of a held stream ran because something waited for it
};
Waits waits();

// --- memory ----------------------------------------------------------------------------------

// Bytes are exact: nothing is rounded up. Figures are at c10::getDeviceAllocator(kDeviceType) and
// at::getHostAllocator(kDeviceType), as for any accelerator.
struct MemoryPolicy {
  // Fill memory with kPoison where it is fresh, and when it is freed: once the work queued before
  // the free on the stream it was allocated on has run, as a later tensor's data would.
  bool poison_freed = false;
  // Keep freed memory and give it at once to the next allocation of the same size on the same
  // stream, as CUDA's caching allocator does; else it goes back to the system.
  bool reuse_freed = false;
  // An allocation that would take a device beyond this raises c10::OutOfMemoryError.
  size_t device_bytes = size_t{1} << 30;
};
void set_memory_policy(MemoryPolicy policy);

// Calls `listener` after every allocation (and with negative bytes after every free) on a device,
// from now on, with the allocator locked; null: nobody. Not forgotten by reset().
using AllocationListener = void (*)(c10::DeviceIndex device, int64_t bytes);
void tell_allocations(AllocationListener listener);
MemoryPolicy memory_policy();

}  // namespace fake_accelerator
