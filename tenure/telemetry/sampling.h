// Sampling: a rank's row, in two parts. What moves within a step is read by the training thread
// when the step ends; what the system has to say is added by the monitor's own thread.
//
// Peaks never disturb another reader of the allocator's statistics: nothing is reset. The highest
// value since the last interval is known where each allocation is told (Meter), or where the
// allocator's own peak has risen since; elsewhere it is absent.
//
// Threading: begin() on the training thread, finish() on one other, rows in the same order.
#pragma once

#include <tenure/core/meter.h>
#include <tenure/core/sample.h>
#include <tenure/telemetry/growth.h>
#include <tenure/telemetry/keys.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>

namespace tenure::telemetry {

class Sampling {
 public:
  Sampling();

  // After `steps` more steps, `step` in all.
  [[nodiscard]] Row begin(uint64_t step, uint64_t steps);
  void finish(Row& row);

  // Whether the peak of device memory within an interval is always known.
  bool knows_peaks() const { return !meter_ || meter_->precision() == Meter::Precision::traced; }

 private:
  // The highest value since the start, and since the last interval if it rose.
  struct Peak {
    int64_t top = 0;
    int64_t seen = 0;
    std::optional<int64_t> risen(int64_t told);
  };
  enum Which : uint8_t { allocated, active, inactive, reserved, rss, kPeaks };

  void follow(const DeviceSample& device);
  void read_device(Row& row, const DeviceSample& device);
  static void read_ledger(Row& row);
  static void read_driver(Row& row, const DriverSample& driver);
  void read_host(Row& row);
  void read_trends(Row& row);

  Sampler::Refresh refresh_;
  std::optional<c10::Device> device_;  // the one on which the process has reserved most
  std::optional<Meter> meter_;
  std::array<Peak, kPeaks> peaks_;
  std::chrono::steady_clock::time_point last_;
  Series device_series_;
  Series device_taken_;
  Series host_series_;
  Series host_taken_;
};

}  // namespace tenure::telemetry
