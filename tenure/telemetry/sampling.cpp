#include <tenure/telemetry/sampling.h>

#include <tenure/core/ledger.h>
#include <tenure/core/part.h>

#include <algorithm>
#include <ranges>
#include <string_view>

namespace tenure::telemetry {
namespace {

// Slower growth is none: a list of losses, say.
constexpr double kLeastGrowth = 2048;

std::optional<int64_t> permille(std::optional<int64_t> part, std::optional<int64_t> whole) {
  if (!part || !whole || *whole <= 0) {
    return std::nullopt;
  }
  return static_cast<int64_t>(static_cast<double>(*part) / static_cast<double>(*whole) * 1000);
}

int64_t now_since_1970() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// The one on which the process has reserved most. None: null.
const DeviceSample* own_device(const std::vector<DeviceSample>& devices) {
  const auto reserved_on = [](const DeviceSample& one) {
    return one.allocator ? one.allocator->reserved.current : -1;
  };
  const auto most = std::ranges::max_element(devices, {}, reserved_on);
  return most == devices.end() ? nullptr : &*most;
}

int64_t sum(int64_t a, int64_t b) { return a + b; }
int64_t higher(int64_t a, int64_t b) { return std::max(a, b); }

// A figure of all parts that have it, as one. None has it, or it is 0 in all: nullopt.
std::optional<int64_t> of_parts(std::string_view figure, int64_t (*together)(int64_t, int64_t)) {
  std::optional<int64_t> out;
  for (const auto& part : parts()) {
    if (!part->stats) {
      continue;
    }
    for (const auto& [name, value] : part->stats()) {
      if (name == figure && value > 0) {
        out = out ? together(*out, value) : value;
      }
    }
  }
  return out;
}

}  // namespace

Sampling::Sampling()
    : refresh_(Sampler::shared().refresh()), last_(std::chrono::steady_clock::now()) {
  const auto now = Sampler::shared().sample();
  peaks_[rss].seen = now.process.peak_rss.value_or(0);
  peaks_[rss].top = peaks_[rss].seen;
  const auto devices = sample_allocators();
  if (const auto* own = own_device(devices)) {
    follow(*own);
  }
}

// What its allocator has had before is no interval's.
void Sampling::follow(const DeviceSample& device) {
  device_ = device.device;
  meter_.emplace(device.device);
  std::fill_n(peaks_.begin(), static_cast<size_t>(rss), Peak{});
  if (device.allocator) {
    peaks_[allocated].seen = device.allocator->allocated.peak;
    peaks_[active].seen = device.allocator->active.peak;
    peaks_[inactive].seen = device.allocator->inactive.peak;
    peaks_[reserved].seen = device.allocator->reserved.peak;
  }
}

std::optional<int64_t> Sampling::Peak::risen(int64_t told) {
  // A peak that fell was reset by someone: what it says is since then.
  const bool rose = told > seen;
  seen = told;
  top = std::max(top, told);
  return rose ? std::optional(told) : std::nullopt;
}

Row Sampling::begin(uint64_t step, uint64_t steps) {
  Row row;
  row.step = step;
  row.when = now_since_1970();
  row.set(K::step, static_cast<int64_t>(step));
  const auto now = std::chrono::steady_clock::now();
  row.set(K::step_time, std::chrono::duration_cast<std::chrono::microseconds>(now - last_).count() /
                            static_cast<int64_t>(std::max<uint64_t>(steps, 1)));
  last_ = now;
  const auto devices = sample_allocators();
  if (const auto* own = own_device(devices)) {
    read_device(row, *own);
  }
  read_ledger(row);
  return row;
}

void Sampling::read_device(Row& row, const DeviceSample& device) {
  const bool first = !device_;  // it came into use in this interval: its peaks are all of it
  if (device_ != device.device) {
    follow(device);
    if (first) {
      std::fill_n(peaks_.begin(), static_cast<size_t>(rss), Peak{});
    }
  }
  const auto set = [&](const Gauge& gauge, Which which, K current, K peak, K top) {
    row.set(current, gauge.current);
    row.set(peak, peaks_[which].risen(gauge.peak));
    peaks_[which].top = std::max(peaks_[which].top, gauge.current);
    row.set(top, peaks_[which].top);
  };
  if (const auto& gauges = device.allocator) {
    set(gauges->allocated, allocated, K::device_allocated, K::device_allocated_peak,
        K::device_allocated_top);
    set(gauges->active, active, K::device_active, K::device_active_peak, K::device_active_top);
    set(gauges->inactive, inactive, K::device_inactive, K::device_inactive_peak,
        K::device_inactive_top);
    set(gauges->reserved, reserved, K::device_reserved, K::device_reserved_peak,
        K::device_reserved_top);
    if (meter_ && meter_->precision() == Meter::Precision::traced) {
      const auto peak = std::max(meter_->read().peak, first ? gauges->allocated.peak : 0);
      peaks_[allocated].top = std::max(peaks_[allocated].top, peak);
      row.set(K::device_allocated_peak, peak);
      row.set(K::device_allocated_top, peaks_[allocated].top);
    }
    row.set(K::device_blocks, gauges->blocks);
    row.set(K::device_retries, gauges->retries);
    row.set(K::device_ooms, gauges->ooms);
    row.set(K::device_fragmentation,
            permille(gauges->inactive.current, std::max<int64_t>(gauges->reserved.current, 1)));
  }
}

void Sampling::read_ledger(Row& row) {
  const auto totals = ledger().totals();
  const auto of = [&](OwnerKind kind) {
    return static_cast<int64_t>(totals.by_kind[static_cast<size_t>(kind)].bytes);
  };
  row.set(K::parameters, of(OwnerKind::parameter));
  row.set(K::gradients, of(OwnerKind::gradient));
  row.set(K::optimizer, of(OwnerKind::optimizer));
  row.set(K::activations, of(OwnerKind::activation));
  row.set(K::offloaded, of(OwnerKind::host_copy));
  row.set(K::receive_buffers, of(OwnerKind::receive_buffer));
  row.set(K::stored_objects, of(OwnerKind::stored_object));
  row.set(K::other, of(OwnerKind::communication) + of(OwnerKind::workspace) + of(OwnerKind::user));
  row.set(K::leases, static_cast<int64_t>(totals.all.leases));
}

void Sampling::finish(Row& row) {
  read_host(row);
  // What one promises of the whole device holds what another promises of its own share.
  row.set(K::bound, of_parts("bound_bytes", higher));
  if (const auto stored =
          of_parts("stored_bytes", sum)) {  // beside what is leased: kept from others
    row.set(K::stored_objects, row.get(K::stored_objects).value_or(0) + *stored);
  }
  read_trends(row);
}

// A run dies at the highest moment of a step, not at its end.
void Sampling::read_driver(Row& row, const DriverSample& driver) {
  row.set(K::device_free, driver.free);
  row.set(K::device_total, driver.total);
  const auto ours = row.get(K::device_reserved).value_or(0);
  const auto others = std::max<int64_t>(driver.total - driver.free - ours, 0);
  row.set(K::device_others, others);
  const auto peak = row.get(K::device_allocated_peak);
  const auto used = std::max(row.get(K::device_active).value_or(0),
                             peak.value_or(row.get(K::device_allocated_top).value_or(0)));
  const auto left = driver.total - others - used - row.get(K::device_inactive).value_or(0);
  row.set(K::device_headroom, std::max<int64_t>(left, 0));
  row.set(K::device_headroom_share, permille(row.get(K::device_headroom), driver.total));
}

void Sampling::read_host(Row& row) {
  const auto now = Sampler::shared().sample();
  const auto* own = own_device(now.devices);
  const auto reserved_then = row.get(K::device_reserved);
  if (own != nullptr && own->driver && own->allocator && reserved_then) {
    // What the allocator has taken since the row was begun is not others'.
    auto driver = *own->driver;
    driver.free += own->allocator->reserved.current - *reserved_then;
    read_driver(row, driver);
  }
  const auto& process = now.process;
  row.set(K::host_rss, process.rss);
  if (process.peak_rss) {
    row.set(K::host_rss_peak, peaks_[rss].risen(*process.peak_rss));
    peaks_[rss].top = std::max(peaks_[rss].top, process.rss);
    row.set(K::host_rss_top, peaks_[rss].top);
  }
  row.set(K::host_shared, process.shared);
  row.set(K::host_swap, process.swap);
  if (process.mapped) {
    row.set(K::host_pss, process.mapped->pss);
  }
  if (now.pinned) {
    row.set(K::host_pinned, now.pinned->reserved.current);
    row.set(K::host_pinned_active, now.pinned->active);
  }
  row.set(K::host_available, process.host_available);
  // Of several limits the one that is reached first.
  auto limit = process.host_total;
  auto left = process.host_available;
  const auto look_at = [&](std::optional<int64_t> other, std::optional<int64_t> left_of_it) {
    if (left_of_it && (!left || *left_of_it < *left)) {
      left = std::max<int64_t>(*left_of_it, 0);
      limit = other;
    }
  };
  if (process.cgroup && process.cgroup->headroom) {
    const auto cached = process.mapped ? process.mapped->cgroup_inactive_file.value_or(0) : 0;
    look_at(process.cgroup->limit, *process.cgroup->headroom + cached);  // files are dropped first
  }
  if (process.data_limit && process.data) {
    look_at(process.data_limit, *process.data_limit - *process.data);
  }
  if (process.virtual_limit) {
    look_at(process.virtual_limit, *process.virtual_limit - process.virtual_size);
  }
  row.set(K::host_limit, limit);
  row.set(K::host_headroom, left);
  row.set(K::host_headroom_share, permille(left, limit));
}

void Sampling::read_trends(Row& row) {
  const auto step = static_cast<double>(row.step);
  std::optional<Forecast> nearest;
  const auto look = [&](std::optional<int64_t> value, K headroom, K limit, K told, Series& series,
                        Series& taken) {
    if (!value) {
      return;
    }
    series.add(step, static_cast<double>(*value));
    if (const auto slope = series.slope()) {
      row.set(told, static_cast<int64_t>(slope->typical));
    }
    const auto left = row.get(headroom);
    const auto most = row.get(limit);
    if (!left || !most) {
      return;
    }
    taken.add(step, static_cast<double>(*most - *left));
    const auto own = series.growth(kLeastGrowth);
    if (!own) {
      return;  // others' growth alone is not this run's end
    }
    const auto all = taken.growth(kLeastGrowth).value_or(*own);
    const auto end = forecast(*left, all.typical > own->typical ? all : *own, series.span());
    if (end && (!nearest || end->steps < nearest->steps)) {
      nearest = end;
    }
  };
  auto device = row.get(K::device_allocated);
  if (device) {
    *device += row.get(K::device_inactive).value_or(0);
  }
  look(device, K::device_headroom, K::device_total, K::device_growth, device_series_,
       device_taken_);
  look(row.get(K::host_rss), K::host_headroom, K::host_limit, K::host_growth, host_series_,
       host_taken_);
  if (nearest) {
    row.set(K::steps_left, nearest->steps);
    row.set(K::steps_left_earliest, nearest->earliest);
    row.set(K::steps_left_latest, nearest->latest);
  }
}

}  // namespace tenure::telemetry
