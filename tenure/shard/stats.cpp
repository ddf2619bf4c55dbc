#include <tenure/shard/stats.h>

#include <tenure/core/text.h>

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <string_view>

namespace tenure::shard {

std::string stats_text(const Stats& stats) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1);
  out << "Shard: " << bytes_text(stats.piece_bytes) << " of pieces, "
      << bytes_text(stats.gathered_bytes) << " gathered now, after "
      << (stats.passes == 1 ? "1 pass" : text(stats.passes, " passes")) << "\n";
  out << "  the last whole pass: " << bytes_text(stats.peak_gathered) << " gathered at most, "
      << bytes_text(stats.peak_needed) << " needed (excess " << std::setprecision(2)
      << stats.excess() << std::setprecision(1) << "), " << bytes_text(stats.moved_bytes)
      << " gathered, " << bytes_text(stats.reduced_bytes) << " added up, waited "
      << stats.waited * 1e3 << " ms, release lag " << stats.lag * 1e6 << " us\n";
  size_t widest = std::string_view("unit").size();
  for (const auto& unit : stats.units) {
    widest = std::max(widest, unit.name.size());
  }
  const auto row = [&](std::string_view name, const auto&... cells) {
    out << "  " << std::left << std::setw(static_cast<int>(widest)) << name << std::right;
    ((out << std::setw(12) << cells), ...);
    out << "\n";
  };
  row("unit", "bytes", "gathers", "ahead", "sums", "waited ms", "moving ms", "lag us");
  for (const auto& unit : stats.units) {
    row(unit.name, bytes_text(unit.bytes), unit.gathers, unit.ahead, unit.reduces,
        unit.waited * 1e3, unit.moving * 1e3, unit.lag * 1e6);
  }
  auto told = out.str();
  told.pop_back();  // the last line's end
  return told;
}

}  // namespace tenure::shard
