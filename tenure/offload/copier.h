// Copier: moves bytes between a device and the host, on streams of its own. A copy is queued and
// nobody waits for it: each returns a fence. On the CPU a copy is done when the call returns.
//
// Any thread may call, one at a time.
#pragma once

#include <tenure/core/fence.h>
#include <tenure/offload/host_copy.h>
#include <tenure/offload/moved.h>

#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

namespace c10 {
class Event;
}  // namespace c10

namespace tenure::offload {

// How many streams copies have for themselves: two, one each way; one for both; none, then they
// run on the stream that computes.
enum class Streams : uint8_t { none, one, two };

// Whether someone waits for a copy already: then it overtakes those that are fetched ahead.
enum class Urgency : uint8_t { ahead, now };

class Copier {
 public:
  Copier(c10::Device device, Streams streams);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // The bytes of `storage` from `begin` on, once what `compute` has queued is done, and once no
  // earlier copy uses the memory of `to`. The caller keeps the storage until the fence is ready.
  Fence out(const c10::Storage& storage, size_t begin, HostCopy& to, const c10::Stream& compute);
  // All of `from` to the beginning of `storage`, which was allocated on `compute`, once `left` is
  // ready. The caller keeps the storage until the fence is ready.
  Fence back(HostCopy& from, const c10::Storage& storage, const c10::Stream& compute,
             const Fence& left, Urgency urgency);
  // What is queued on `compute` from now on waits for the fence; counted as exposed time.
  void wait(const Fence& fence, const c10::Stream& compute);

  // Times copies and waits from now on, with an event at either end of each, or no more. Exposed
  // time is counted from here.
  void start_measuring();
  void stop_measuring() { measuring_ = false; }
  // Adds what has been timed and is done. Cheap, waits for nothing.
  void collect();
  // Adds all of it. Waits for the device.
  void collect_all();

  const Moved& moved_out() const { return out_; }
  const Moved& moved_back() const { return back_; }
  double exposed_seconds() const { return *exposed_; }

 private:
  struct Timing;
  // Begins to time what is queued on `stream` next; end() with what it returns.
  std::unique_ptr<Timing> begin(const c10::Stream& stream, Moved* moved, uint64_t bytes);
  void end(std::unique_ptr<Timing> timing, const c10::Stream& stream);

  c10::Device device_;
  std::optional<c10::Stream> out_stream_;
  std::optional<c10::Stream> back_stream_;
  std::optional<c10::Stream> urgent_stream_;
  bool measuring_ = false;
  std::deque<std::unique_ptr<Timing>> timings_;
  Moved out_;
  Moved back_;
  std::shared_ptr<double> exposed_ = std::make_shared<double>(0);  // shared with timings under way
};

}  // namespace tenure::offload
