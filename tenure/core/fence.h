// Fence: a point in a device's work. Recorded on a stream, it becomes ready when everything queued
// there before it is done; others wait for it before they free or reuse memory. On the CPU, where
// work is done when a call returns, a fence is ready at once.
//
// A small value, shared by copying. Any thread may ask or wait.
#pragma once

#include <memory>

namespace c10 {
class Stream;
struct Device;
}  // namespace c10

namespace tenure {

class Fence {
 public:
  // What a fence waits for. A seam: tests bring their own.
  class Point {
   public:
    Point() = default;
    Point(const Point&) = delete;
    Point& operator=(const Point&) = delete;
    virtual ~Point() = default;
    virtual bool ready() const = 0;
    virtual void wait_on_host() const = 0;
    virtual void wait_on(const c10::Stream& stream) const = 0;
  };

  // Ready from the start.
  Fence() = default;
  explicit Fence(std::shared_ptr<const Point> point) : point_(std::move(point)) {}

  // On the current stream of `device`, or on `stream`.
  static Fence record(c10::Device device);
  static Fence record(const c10::Stream& stream);

  bool ready() const { return point_ == nullptr || point_->ready(); }
  // The calling thread waits. Does not hold the GIL back: release it before, as the bindings do.
  void wait() const {
    if (point_ != nullptr) {
      point_->wait_on_host();
    }
  }
  // Work queued on `stream` from now on waits; the calling thread does not.
  void wait(const c10::Stream& stream) const {
    if (point_ != nullptr) {
      point_->wait_on(stream);
    }
  }

 private:
  std::shared_ptr<const Point> point_;  // shared: one event may hold back several releases
};

}  // namespace tenure
