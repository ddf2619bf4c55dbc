// The queues behind the fake accelerator's streams: one lane a stream, run in order, and marks that
// say how far a lane has come. Events are marks; see fake_accelerator.h for what tests may rely on.
//
// Threading: any thread, one lock. Work runs under that lock, so it must not call back into here.
// Lanes live for ever: a stream is a number that anyone may have kept.
#pragma once

#include "fake_accelerator.h"

#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

namespace fake_accelerator {

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id);
// Raises where there is no such device.
void check_device(c10::DeviceIndex device);

struct Lane;

// A place in a lane: reached once everything queued before it has run.
struct Mark {
  Lane* lane = nullptr;
  uint64_t position = 0;
};

class Lanes {
 public:
  static Lanes& get();

  c10::Stream create(c10::DeviceIndex device);
  c10::Stream pooled(c10::DeviceIndex device);

  void enqueue(c10::Stream stream, std::function<void()> work);
  // The item is reached like any other, so that `advance` can stop before it.
  Mark record(c10::Stream stream, std::function<void()> on_reached = nullptr);
  void wait(c10::Stream stream, Mark mark);

  // The place behind all that is queued now, without an item of its own.
  Mark here(c10::Stream stream);
  bool reached(Mark mark);
  bool quiet();  // nothing is queued anywhere

  // As a host asks and waits: gives lanes a turn when shuffling, counts the wait.
  bool query(Mark mark);
  void synchronize(Mark mark);
  void synchronize_device(c10::DeviceIndex device);
  // As compute on the stream waits: no host is stalled, so nothing is counted but what it forces.
  void drain(c10::Stream stream);

  void hold(c10::Stream stream);
  void release(c10::Stream stream);
  size_t advance(c10::Stream stream, size_t items);
  bool held(c10::Stream stream);
  size_t pending(c10::Stream stream);
  void shuffle(uint64_t seed);
  void run_in_order();
  Waits waits();
  void reset();

 private:
  Lanes();
  Lane& lane(c10::Stream stream);
  void append(Lane& lane, std::optional<Mark> awaits, std::function<void()> work);
  void run_next(Lane& lane);
  void force(Lane& lane, uint64_t position);
  void make_progress();
  void take_turns();
  void settle();

  std::mutex mutex_;
  std::array<std::vector<std::unique_ptr<Lane>>, kDeviceCount> lanes_;
  std::array<std::vector<c10::StreamId>, kDeviceCount> pool_;
  std::array<size_t, kDeviceCount> next_in_pool_{};
  std::optional<std::mt19937_64> dice_;
  size_t queued_ = 0;
  Waits waits_;
};

}  // namespace fake_accelerator
