#include "lanes.h"

#include <c10/util/Exception.h>

namespace fake_accelerator {

struct Item {
  std::optional<Mark> awaits;
  std::function<void()> work;
};

struct Lane {
  std::deque<Item> queue;
  uint64_t done = 0;
  bool held = false;

  uint64_t end() const { return done + queue.size(); }
};

namespace {

constexpr size_t kPoolSize = 32;  // as many as CUDA has

bool is_reached(const Mark& mark) {
  return mark.lane == nullptr || mark.lane->done >= mark.position;
}

bool can_run(const Lane& lane) {
  return !lane.queue.empty() &&
         (!lane.queue.front().awaits || is_reached(*lane.queue.front().awaits));
}

}  // namespace

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, device), id);
}

void check_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDeviceCount, "there is no fake device ", int{device});
}

Lanes& Lanes::get() {
  // Leaked: tensors may die, and so free their memory here, after static destructors ran.
  static Lanes* lanes = new Lanes;
  return *lanes;
}

Lanes::Lanes() {
  for (auto& of_device : lanes_) {
    of_device.push_back(std::make_unique<Lane>());  // the default stream has id 0
  }
}

Lane& Lanes::lane(c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == kDeviceType,
              "not a stream of the fake accelerator: ", stream);
  check_device(stream.device_index());
  auto& of_device = lanes_[stream.device_index()];
  TORCH_CHECK(stream.id() >= 0 && static_cast<size_t>(stream.id()) < of_device.size(),
              "no such stream on the fake device: ", stream);
  return *of_device[stream.id()];
}

c10::Stream Lanes::create(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  check_device(device);
  auto& of_device = lanes_[device];
  of_device.push_back(std::make_unique<Lane>());
  return stream_of(device, static_cast<c10::StreamId>(of_device.size() - 1));
}

c10::Stream Lanes::pooled(c10::DeviceIndex device) {
  {
    std::lock_guard lock(mutex_);
    check_device(device);
    if (pool_[device].size() == kPoolSize) {
      return stream_of(device, pool_[device][next_in_pool_[device]++ % kPoolSize]);
    }
  }
  const auto stream = create(device);
  std::lock_guard lock(mutex_);
  pool_[device].push_back(stream.id());
  return stream;
}

// --- running ---------------------------------------------------------------------------------

void Lanes::append(Lane& lane, std::optional<Mark> awaits, std::function<void()> work) {
  lane.queue.push_back({awaits, std::move(work)});
  ++queued_;
  settle();
}

void Lanes::run_next(Lane& lane) {
  Item item = std::move(lane.queue.front());
  lane.queue.pop_front();
  ++lane.done;
  --queued_;
  if (item.work) {
    item.work();
  }
}

// Ends, because a wait names a mark that was recorded before the wait was queued: following waits
// only ever leads to items queued earlier.
void Lanes::force(Lane& lane, uint64_t position) {
  while (lane.done < position) {
    if (const auto awaits = lane.queue.front().awaits; awaits && !is_reached(*awaits)) {
      force(*awaits->lane, awaits->position);
    }
    if (lane.held) {
      ++waits_.forced;
    }
    run_next(lane);
  }
}

void Lanes::make_progress() {
  for (bool progress = queued_ > 0; progress;) {
    progress = false;
    for (auto& of_device : lanes_) {
      for (auto& lane : of_device) {
        while (!lane->held && can_run(*lane)) {
          run_next(*lane);
          progress = true;
        }
      }
    }
  }
}

void Lanes::take_turns() {
  std::vector<Lane*> ready;
  while (queued_ > 0) {
    ready.clear();
    for (auto& of_device : lanes_) {
      for (auto& lane : of_device) {
        if (!lane->held && can_run(*lane)) {
          ready.push_back(lane.get());
        }
      }
    }
    const size_t chosen = (*dice_)() % (ready.size() + 1);
    if (chosen == ready.size()) {
      return;
    }
    run_next(*ready[chosen]);
  }
}

void Lanes::settle() { dice_ ? take_turns() : make_progress(); }

// --- queueing --------------------------------------------------------------------------------

void Lanes::enqueue(c10::Stream stream, std::function<void()> work) {
  std::lock_guard lock(mutex_);
  append(lane(stream), std::nullopt, std::move(work));
}

Mark Lanes::record(c10::Stream stream, std::function<void()> on_reached) {
  std::lock_guard lock(mutex_);
  Lane& on = lane(stream);
  const Mark mark{&on, on.end() + 1};
  append(on, std::nullopt, std::move(on_reached));
  return mark;
}

void Lanes::wait(c10::Stream stream, Mark mark) {
  std::lock_guard lock(mutex_);
  append(lane(stream), mark, nullptr);
}

Mark Lanes::here(c10::Stream stream) {
  std::lock_guard lock(mutex_);
  Lane& on = lane(stream);
  return {&on, on.end()};
}

bool Lanes::reached(Mark mark) {
  std::lock_guard lock(mutex_);
  return is_reached(mark);
}

bool Lanes::quiet() {
  std::lock_guard lock(mutex_);
  return queued_ == 0;
}

// --- waiting ---------------------------------------------------------------------------------

bool Lanes::query(Mark mark) {
  std::lock_guard lock(mutex_);
  settle();
  return is_reached(mark);
}

void Lanes::synchronize(Mark mark) {
  std::lock_guard lock(mutex_);
  ++waits_.host;
  if (mark.lane != nullptr) {
    force(*mark.lane, mark.position);
  }
  settle();
}

void Lanes::synchronize_device(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  check_device(device);
  ++waits_.host;
  for (auto& lane : lanes_[device]) {
    force(*lane, lane->end());
  }
  settle();
}

void Lanes::drain(c10::Stream stream) {
  std::lock_guard lock(mutex_);
  Lane& on = lane(stream);
  force(on, on.end());
  settle();
}

// --- what tests control ----------------------------------------------------------------------

void Lanes::hold(c10::Stream stream) {
  std::lock_guard lock(mutex_);
  lane(stream).held = true;
}

void Lanes::release(c10::Stream stream) {
  std::lock_guard lock(mutex_);
  lane(stream).held = false;
  settle();
}

size_t Lanes::advance(c10::Stream stream, size_t items) {
  std::lock_guard lock(mutex_);
  Lane& on = lane(stream);
  size_t ran = 0;
  while (ran < items && can_run(on)) {
    run_next(on);
    ++ran;
  }
  settle();
  return ran;
}

bool Lanes::held(c10::Stream stream) {
  std::lock_guard lock(mutex_);
  return lane(stream).held;
}

size_t Lanes::pending(c10::Stream stream) {
  std::lock_guard lock(mutex_);
  return lane(stream).queue.size();
}

void Lanes::shuffle(uint64_t seed) {
  std::lock_guard lock(mutex_);
  dice_.emplace(seed);
}

void Lanes::run_in_order() {
  std::lock_guard lock(mutex_);
  dice_.reset();
  settle();
}

Waits Lanes::waits() {
  std::lock_guard lock(mutex_);
  return waits_;
}

void Lanes::reset() {
  std::lock_guard lock(mutex_);
  dice_.reset();
  for (auto& of_device : lanes_) {
    for (auto& lane : of_device) {
      lane->held = false;
    }
  }
  settle();
  waits_ = {};
}

}  // namespace fake_accelerator
