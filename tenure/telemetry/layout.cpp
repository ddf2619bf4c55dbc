#include <tenure/telemetry/layout.h>

#include <tenure/core/text.h>

#include <algorithm>
#include <array>
#include <utility>

namespace tenure::telemetry {

void write_words(std::span<const Key> keys, std::span<const int64_t> figures, uint32_t rank,
                 uint32_t stage, std::span<int64_t> words) {
  std::ranges::fill(words, kNoWord);
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto figure =
        figures[i] == Row::kAbsent ? std::nullopt : std::optional<int64_t>(figures[i]);
    const auto word = pack(keys[i], figure, rank);
    words[i] = word;
    words[(size_t{1} + stage) * keys.size() + i] = word;
  }
}

void write_words(const Row& row, uint32_t rank, uint32_t stage, std::span<int64_t> words) {
  write_words(keys(), row.figures, rank, stage, words);
}

std::vector<std::optional<Found>> read_words(std::span<const int64_t> words,
                                             std::span<const Key> of) {
  std::vector<std::optional<Found>> out;
  out.reserve(words.size());
  for (size_t i = 0; i < words.size(); ++i) {
    out.push_back(unpack(of[i % of.size()], words[i]));
  }
  return out;
}

void drop_unknown_peaks(std::span<std::optional<Found>> found, bool exact) {
  constexpr auto peaks = std::to_array<std::pair<K, K>>({
      {K::device_allocated_peak, K::device_allocated_top},
      {K::device_active_peak, K::device_active_top},
      {K::device_inactive_peak, K::device_inactive_top},
      {K::device_reserved_peak, K::device_reserved_top},
      {K::host_rss_peak, K::host_rss_top},
  });
  for (size_t slot = 0; slot < found.size(); slot += kKeys) {
    for (const auto& [interval, start] : peaks) {
      auto& peak = found[slot + static_cast<size_t>(interval)];
      const auto& top = found[slot + static_cast<size_t>(start)];
      const bool known = exact && interval == K::device_allocated_peak;
      if (!known && peak && top && peak->value < top->value) {
        peak.reset();
      }
    }
  }
}

std::string layout_text() {
  std::string out = "tenure telemetry 1:";
  for (const auto& key : keys()) {
    out += text(" ", key.name, key.extreme == Extreme::lowest ? "<" : ">",
                key.is_signed ? "signed" : "");
  }
  return out;
}

uint32_t peak_rank(std::span<const std::optional<Found>> found) {
  const auto of = [&](K key) { return found[static_cast<size_t>(key)]; };
  // A peak that is not new may be absent: the rank that has it is then told by what it holds now.
  const auto peak = of(K::device_allocated_peak);
  const auto now = of(K::device_allocated);
  if (peak && (!now || peak->value >= now->value)) {
    return peak->rank;
  }
  if (now) {
    return now->rank;
  }
  const auto host = of(K::host_rss);
  return host ? host->rank : 0;
}

}  // namespace tenure::telemetry
