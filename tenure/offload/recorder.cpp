#include <tenure/offload/recorder.h>

#include <algorithm>

namespace tenure::offload {

void Recorder::begin(Meter* meter) {
  meter_ = meter;
  timeline_ = {};
  alive_.clear();
  any_needed_ = false;
  timeline_.at_begin = meter_ != nullptr ? meter_->read().current : 0;
  level_ = timeline_.at_begin;
  peak_ = timeline_.at_begin;
}

size_t Recorder::saved(const StorageRef& storage, uint64_t bytes) {
  const auto now = tick();
  timeline_.saved.push_back({.bytes = bytes, .saved = now});
  alive_.emplace_back(timeline_.saved.size() - 1, storage);
  return timeline_.saved.size() - 1;
}

void Recorder::needed(size_t index) {
  if (index >= timeline_.saved.size()) {
    return;
  }
  if (timeline_.saved[index].needed == kNever) {
    const auto now = tick();
    timeline_.saved[index].needed = now;
    any_needed_ = true;
  }
  auto& saved = timeline_.saved[index];
  saved.last = timeline_.peak.size() - 1;
  ++saved.uses;
}

std::vector<StorageRef> Recorder::end() {
  read();
  notice_gone();
  std::vector<StorageRef> out;
  for (auto& [index, storage] : alive_) {
    out.push_back(std::move(storage));
  }
  alive_.clear();
  return out;
}

size_t Recorder::tick() {
  read();
  notice_gone();
  timeline_.peak.push_back(0);
  timeline_.level.push_back(level_);
  return timeline_.peak.size() - 1;
}

// Whom everybody has let go since the last tick.
void Recorder::notice_gone() {
  std::erase_if(alive_, [&](const auto& entry) {
    if (held_ ? held_(entry.first, entry.second) : entry.second.alive()) {
      return false;
    }
    timeline_.saved[entry.first].gone = timeline_.peak.size();
    return true;
  });
}

// Closes the interval that is open.
void Recorder::read() {
  if (meter_ == nullptr) {
    return;
  }
  const auto now = meter_->read();
  level_ = now.current;
  peak_ = std::max(peak_, now.peak);
  if (!timeline_.peak.empty()) {
    timeline_.peak.back() = std::max(timeline_.peak.back(), now.peak);
  }
}

void Recorder::pause() {
  read();
  paused_ = level_;
}

int64_t Recorder::resume() {
  return meter_ == nullptr ? 0 : std::max<int64_t>(meter_->read().peak - paused_, 0);
}

}  // namespace tenure::offload
