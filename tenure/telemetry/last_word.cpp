#include <tenure/telemetry/last_word.h>

#include <tenure/core/clock.h>
#include <tenure/core/ledger.h>
#include <tenure/core/sample.h>

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iomanip>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

namespace tenure::telemetry {
namespace {

// Members of one JSON object. Names are ours and need no escapes.
class Members {
 public:
  void add(std::string_view name, std::optional<int64_t> value) {
    if (value) {
      begin(name) << *value;
    }
  }
  void add(std::string_view name, const Members& inner) { begin(name) << inner.object(); }
  void add_text(std::string_view name, std::string_view text) { begin(name) << '"' << text << '"'; }
  void add_json(std::string_view name, std::string_view json) { begin(name) << json; }
  std::string object() const { return "{" + out_.str() + "}"; }
  std::string after(std::string_view object) const {
    return std::string(object.substr(0, object.rfind('}'))) + "," + out_.str() + "}";
  }

 private:
  std::ostream& begin(std::string_view name) {
    if (!empty_) {
      out_ << ',';
    }
    empty_ = false;
    return out_ << '"' << name << "\":";
  }
  std::ostringstream out_;
  bool empty_ = true;
};

Members host_of(const ProcessSample& process) {
  Members out;
  out.add("rss_bytes", process.rss);
  out.add("rss_top_bytes", process.peak_rss);
  out.add("shared_bytes", process.shared);
  out.add("swap_bytes", process.swap);
  out.add("total_bytes", process.host_total);
  out.add("available_bytes", process.host_available);
  return out;
}

std::string devices_of(const std::vector<DeviceSample>& devices) {
  std::string out = "[";
  for (const auto& one : devices) {
    Members device;
    device.add_text("device", one.device.str());
    if (one.allocator) {
      device.add("allocated_bytes", one.allocator->allocated.current);
      device.add("reserved_bytes", one.allocator->reserved.current);
      device.add("inactive_bytes", one.allocator->inactive.current);
      device.add("allocated_peak_bytes", one.allocator->allocated.peak);
      device.add("retries", one.allocator->retries);
      device.add("ooms", one.allocator->ooms);
    }
    if (one.driver) {
      device.add("free_bytes", one.driver->free);
      device.add("total_bytes", one.driver->total);
    }
    out += (out.size() > 1 ? "," : "") + device.object();
  }
  return out + "]";
}

Members totals_of(const Totals& totals) {
  Members out;
  out.add("bytes", static_cast<int64_t>(totals.bytes));
  out.add("leases", static_cast<int64_t>(totals.leases));
  out.add("peak_bytes", static_cast<int64_t>(totals.peak));
  return out;
}

Members ledger_of(const KindTotals& totals) {
  Members kinds;
  for (size_t kind = 0; kind < kOwnerKinds; ++kind) {
    const auto& one = totals.by_kind[kind];
    if (one.leases != 0 || one.peak != 0) {
      kinds.add(kind_name(static_cast<OwnerKind>(kind)), totals_of(one));
    }
  }
  Members out;
  out.add("all", totals_of(totals.all));
  out.add("kinds", kinds);
  return out;
}

bool write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const auto written = ::write(file, text.data(), text.size());
    if (written < 0) {
      return false;
    }
    text.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

bool write_whole(const std::string& path, std::string_view text) {
  const auto beside = path + ".row";
  const int file = open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) {
    return false;
  }
  const bool written = write_all(file, text);
  close(file);
  if (!written || std::rename(beside.c_str(), path.c_str()) != 0) {
    unlink(beside.c_str());
    return false;
  }
  return true;
}

}  // namespace

LastWord::LastWord(std::string path, std::string identity)
    : path_(std::move(path)), identity_(std::move(identity)) {}

std::string LastWord::text(const std::string& headline) const {
  using Seconds = std::chrono::duration<double>;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  std::ostringstream seconds;
  seconds << std::fixed << std::setprecision(6) << std::chrono::duration_cast<Seconds>(now).count();
  const auto sample = Sampler::shared().sample();
  Members members;
  members.add_json("time", seconds.str());
  members.add("step", static_cast<int64_t>(clock().now()));
  members.add_json("whole", "false");
  members.add_json("headline", headline);
  members.add("host_memory", host_of(sample.process));
  members.add_json("devices", devices_of(sample.devices));
  members.add("ledger", ledger_of(ledger().totals()));
  const std::lock_guard lock(mutex_);
  if (!earlier_.empty()) {
    members.add_json("earlier", earlier_);
  }
  return members.after(identity_);
}

bool LastWord::write(const std::string& headline) {
  const auto told = text(headline);
  const std::lock_guard lock(mutex_);
  return std::chrono::steady_clock::now() >= kept_until_ && write_whole(path_, told);
}

void LastWord::remember(std::string earlier) {
  const std::lock_guard lock(mutex_);
  earlier_ = std::move(earlier);
}

void LastWord::keep(std::chrono::steady_clock::duration time) {
  const std::lock_guard lock(mutex_);
  kept_until_ = std::chrono::steady_clock::now() + time;
}

}  // namespace tenure::telemetry
