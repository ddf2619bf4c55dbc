#include <tenure/offload/stats.h>

#include <tenure/core/text.h>

#include <iomanip>
#include <sstream>

namespace tenure::offload {

const char* kept_text(Kept reason) {
  switch (reason) {
    case Kept::parameter:
      return "parameters and buffers";
    case Kept::small:
      return "too small to pay";
    case Kept::not_plain:
      return "no plain tensor";
    case Kept::elsewhere:
      return "on another device";
    case Kept::lives_on:
      return "held by others anyway";
    case Kept::budget:
      return "fits the budget";
    case Kept::host_full:
      return "host limit reached";
    case Kept::disk_full:
      return "disk full";
    case Kept::in_backward:
      return "saved during backward";
    case Kept::unplanned:
      return "no plan for it";
  }
  return "";
}

std::string_view mode_name(Mode mode) {
  switch (mode) {
    case Mode::measuring:
      return "measuring";
    case Mode::planned:
      return "planned";
    case Mode::proving:
      return "proving";
    case Mode::following:
      return "following";
  }
  return "";
}

std::string stats_text(const Stats& stats) {
  std::ostringstream out;
  const auto line = [&](const char* name, const Count& count) {
    out << "  " << std::left << std::setw(28) << name << std::right << std::setw(11)
        << bytes_text(count.bytes) << "  in " << count_text(count.count, "storage") << "\n";
  };
  out << "Offload: " << count_text(stats.steps, "step") << ", the last one "
      << mode_name(stats.mode) << "\n";
  line("saved", stats.saved);
  const bool to_disk = stats.file_bytes > 0;
  line(to_disk ? "moved to disk" : "moved to the host", stats.moved_out);
  line("and back", stats.moved_in);
  if (stats.reused.count > 0) {
    line("needed before they had left", stats.reused);
  }
  for (size_t i = 0; i < kKeptReasons; ++i) {
    if (stats.kept[i].count > 0) {
      line(text("kept: ", kept_text(static_cast<Kept>(i))).c_str(), stats.kept[i]);
    }
  }
  out << std::fixed << std::setprecision(1);
  out << "  host " << bytes_text(stats.host_bytes) << " now, " << bytes_text(stats.most_host_bytes)
      << " at most, " << bytes_text(stats.pinned_bytes) << " taken\n";
  if (to_disk) {
    out << "  disk " << bytes_text(stats.disk_bytes) << " now, in a file of "
        << bytes_text(stats.file_bytes) << "\n";
  }
  out << "  copies " << stats.out_bandwidth / 1e9 << " GB/s out, " << stats.in_bandwidth / 1e9
      << " GB/s back; the device waited " << stats.exposed_seconds * 1e3 << " ms for them\n";
  if (stats.peak > 0) {
    out << "  peak " << bytes_text(static_cast<uint64_t>(stats.peak));
    if (stats.budget > 0) {
      out << " of a budget of " << bytes_text(static_cast<uint64_t>(stats.budget));
    }
    if (stats.least > 0) {
      out << ", the least is " << bytes_text(static_cast<uint64_t>(stats.least));
    }
    out << "\n";
  }
  return std::move(out).str();
}

}  // namespace tenure::offload
