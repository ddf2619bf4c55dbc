// Recorder: follows a step tick by tick, and turns it into a Timeline. One thread at a time.
#pragma once

#include <tenure/core/meter.h>
#include <tenure/core/storage_ref.h>
#include <tenure/offload/timeline.h>

#include <functional>
#include <utility>
#include <vector>

namespace tenure::offload {

class Recorder {
 public:
  // Whether someone but us holds a saved storage; by default, whether it is alive.
  using Held = std::function<bool(size_t index, const StorageRef& storage)>;
  void ask_of_holders(Held held) { held_ = std::move(held); }

  // The step begins. Without a meter, as on the CPU, levels are zero.
  void begin(Meter* meter);

  // A storage is saved; its index.
  size_t saved(const StorageRef& storage, uint64_t bytes);
  // It is needed back. The first time is a tick.
  void needed(size_t index);
  // The step is over, though its backward may still come. Returns what someone holds even now.
  std::vector<StorageRef> end();

  // What is allocated from here to resume() does not count. The highest level meanwhile, above that
  // of pause().
  void pause();
  int64_t resume();

  // The interval that is open.
  size_t interval() const { return timeline_.peak.empty() ? 0 : timeline_.peak.size() - 1; }
  const Timeline& timeline() const { return timeline_; }
  // The highest level of the whole step so far.
  int64_t peak() const { return peak_; }
  bool any_needed() const { return any_needed_; }

 private:
  size_t tick();
  void notice_gone();
  void read();

  Meter* meter_ = nullptr;
  Held held_;
  Timeline timeline_;
  std::vector<std::pair<size_t, StorageRef>> alive_;  // saved, and still held by someone
  int64_t peak_ = 0;
  int64_t level_ = 0;   // when it was last read
  int64_t paused_ = 0;  // the level then
  bool any_needed_ = false;
};

}  // namespace tenure::offload
