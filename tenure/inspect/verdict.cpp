#include <tenure/inspect/verdict.h>

#include <tenure/core/text.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <optional>
#include <type_traits>

namespace tenure::inspect {
namespace {

using Series = std::vector<double>;

constexpr size_t kWarmUp = 2;  // steps in which optimizers make their state
// Growth slower than this is none, bytes a step. What is counted storage by storage has no noise.
constexpr double kLeastHeld = 2048;
constexpr double kLeastCounted = 16.0 * 1024;
constexpr double kLeastSeen = 64.0 * 1024;  // by the operating system, in pages
// Since it began, growth must have come to this share of the whole process, or to this many bytes.
constexpr double kLeastShare = 0.02;
constexpr double kLeastHeap = 0.01;     // malloc's own figure, which has little noise
constexpr double kLeastReserve = 0.05;  // what the allocator keeps settles late
constexpr double kLeastBytes = 256.0 * 1024 * 1024;
// An allocator that is not malloc does not tell what it keeps, and takes tens of megabytes before
// it uses again what was freed.
constexpr double kHiddenReserve = 64.0 * 1024 * 1024;
constexpr int64_t kManySteps = 4;       // births of a group that lasts come from so many steps
constexpr double kOthersGrow = 0.05;    // a step's other births, next to one storage that grows
constexpr double kLeads = 3;            // all of a step's births, next to one that makes up much
constexpr double kSmallSuspect = 0.02;  // of all suspects' growth
constexpr double kStartUp = 30;         // seconds
constexpr double kLeastWork = 0.1;      // of a step's peak at first, for larger inputs to matter
constexpr double kLargeShare = 0.2;     // of the growth of all storages
constexpr double kByChance = 2;         // deviations that a count of rises may be off
constexpr double kSure = 0.99;          // of what was counted and did not once become less

Series series_of(std::span<const StepRow> rows,
                 const std::function<double(const StepRow&)>& value) {
  Series out(rows.size());
  std::ranges::transform(rows, out.begin(), value);
  return out;
}

// Rows may stand for several steps each, when older ones were thinned.
double steps_per_row(std::span<const StepRow> rows) {
  return rows.size() < 2 ? 1
                         : static_cast<double>(rows.back().step - rows.front().step) /
                               static_cast<double>(rows.size() - 1);
}

// Note [Rows that were thinned]
// Of a long run every other one of the older rows is left out, again and again, so that the oldest
// lie far apart and the newest close together. A trend has no notion of that: a steady growth would
// look like one that slows down. So such rows are read off anew at even distances, as many as there
// are, on straight lines between those that are known.
bool are_uneven(std::span<const StepRow> rows) {
  uint64_t least = ~uint64_t{0};
  uint64_t most = 0;
  for (size_t i = 1; i < rows.size(); ++i) {
    const auto gap = rows[i].step - rows[i - 1].step;
    least = std::min(least, gap);
    most = std::max(most, gap);
  }
  return most > least;
}

StepRow between(const StepRow& a, const StepRow& b, double share, uint64_t step) {
  std::array<std::optional<double>, 32> others;
  size_t at = 0;
  each_figure(b, [&](const char* /*name*/, const auto& value) {
    const std::optional known(value);
    others.at(at++) = known ? std::optional(static_cast<double>(*known)) : std::nullopt;
  });
  auto out = a;
  at = 0;
  each_figure(out, [&]<class Figure>(const char* /*name*/, Figure& value) {
    const std::optional known(value);
    if (const auto& other = others.at(at++); known && other) {
      const auto from = static_cast<double>(*known);
      value =
          static_cast<std::remove_reference_t<decltype(*known)>>(from + share * (*other - from));
    }
  });
  out.step = step;
  return out;
}

// REQUIRES: at least two rows.
std::vector<StepRow> evenly(std::span<const StepRow> rows) {
  std::vector<StepRow> out;
  out.reserve(rows.size());
  const auto range = rows.back().step - rows.front().step;
  size_t next = 1;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto step = rows.front().step + range * i / (rows.size() - 1);
    while (rows[next].step < step) {
      ++next;
    }
    const auto& before = rows[next - 1];
    const auto share = static_cast<double>(step - before.step) /
                       static_cast<double>(rows[next].step - before.step);
    out.push_back(between(before, rows[next], share, step));
  }
  return out;
}

// The value of an origin's cuts at every row: between two cuts a straight line.
Series at_rows(std::span<const StepRow> rows, std::span<const Cut> cuts,
               int64_t Cut::* const field) {
  Series out;
  size_t next = 0;
  for (const auto& row : rows) {
    while (next < cuts.size() && cuts[next].step <= row.step) {
      ++next;
    }
    if (next == 0) {
      out.push_back(0);  // nothing was alive yet
      continue;
    }
    const auto& before = cuts[next - 1];
    auto value = static_cast<double>(before.*field);
    if (next < cuts.size()) {
      const auto& after = cuts[next];
      value += (static_cast<double>(after.*field) - value) *
               static_cast<double>(row.step - before.step) /
               static_cast<double>(after.step - before.step);
    }
    out.push_back(value);
  }
  return out;
}

// Intervals go on while a program ends, which frees all it had, and the last one may see any part
// of that: what falls further than ever before is no part of the program.
std::span<const StepRow> without_the_end(std::span<const StepRow> rows) {
  int64_t deepest = 0;
  for (size_t i = 1; i < rows.size(); ++i) {
    const auto fall = rows[i - 1].held - rows[i].held;
    if (i >= kFewestSteps && i + 3 >= rows.size() && fall > deepest) {
      return rows.first(i);
    }
    deepest = std::max(deepest, fall);
  }
  return rows;
}

// Of the steps after the last cut nothing is known origin by origin: they are no sign of a level.
std::span<const StepRow> until_last_cut(std::span<const StepRow> rows, const Cuts& cuts) {
  uint64_t last = 0;
  for (const auto& [origin, series] : cuts) {
    last = std::max(last, series.empty() ? 0 : series.back().step);
  }
  const auto after = std::ranges::upper_bound(rows, last, {}, &StepRow::step);
  const auto known = static_cast<size_t>(after - rows.begin());
  return known >= kFewestSteps ? rows.first(known) : rows;
}

const Cut& last_until(std::span<const Cut> cuts, uint64_t step) {
  const auto after = std::ranges::upper_bound(cuts, step, {}, &Cut::step);
  return after == cuts.begin() ? cuts.front() : *(after - 1);
}

int64_t most_births(std::span<const Cut> cuts) {
  int64_t most = 0;
  for (const auto& cut : cuts) {
    most = std::max(most, cut.birth_steps);
  }
  return most;
}

double growth_of(std::span<const Suspect> suspects) {
  double sum = 0;
  for (const auto& suspect : suspects) {
    sum += suspect.per_step;
  }
  return sum;
}

// Judges origin by origin.
class Suspects {
 public:
  Suspects(std::span<const StepRow> rows, const Cuts& cuts, const Evidence& evidence)
      : rows_(rows),
        evidence_(evidence),
        born_(series_of(rows,
                        [](const StepRow& row) { return static_cast<double>(row.born_bytes); })),
        lasting_(rows.size()),
        varying_(rows.size()) {
    for (const auto& [origin, series] : cuts) {
      look_at(origin, series);
    }
    // Storages of one origin may take the place of another's.
    const auto all = trend_of(lasting_, {.least_per_step = kLeastHeld});
    if (!all.grows) {
      found_.clear();
    }
    if (found_.empty()) {
      const auto held =
          series_of(rows, [](const StepRow& row) { return static_cast<double>(row.held); });
      find_contributors(cuts, all.grows ? all : trend_of(held, {.least_per_step = kLeastHeld}));
    }
    if (found_.empty()) {
      add_graphs(cuts);
    }
    const auto sum = growth_of(found_);
    std::erase_if(found_,
                  [&](const Suspect& suspect) { return suspect.per_step < kSmallSuspect * sum; });
    std::ranges::sort(found_, std::greater<>{}, &Suspect::per_step);
    const auto bounded = std::ranges::stable_partition(found_, [&](const Suspect& suspect) {
      return !evidence_.bounded.contains(suspect.origin);
    });
    filling_.assign(bounded.begin(), bounded.end());
    found_.erase(bounded.begin(), bounded.end());
    if (growth_of(found_) < kSmallSuspect * growth_of(filling_)) {
      found_.clear();
    }
  }

  std::vector<Suspect> take() { return std::move(found_); }
  std::vector<Suspect> take_filling() { return std::move(filling_); }
  std::vector<OriginId> doubtful() const { return doubtful_; }
  std::vector<OriginId> leading() const { return leading_; }
  // Bytes that wander: Note [Sizes that vary]. For each row up to the last cut.
  const Series& varying() const { return varying_; }

 private:
  void look_at(OriginId origin, std::span<const Cut> cuts) {
    const auto bytes = at_rows(rows_, cuts, &Cut::bytes);
    const bool lasts = most_births(cuts) >= kManySteps;
    const auto trend = trend_of(bytes, {.least_per_step = kLeastHeld});
    const bool larger = !lasts && trend.grows;
    // If nothing else becomes larger, in the steps in which this one does, it is not the inputs
    // that do.
    const auto work = larger ? slope_of(std::span(born_).subspan(trend.since)) : 0;
    const bool one = larger && (work <= (1 + kOthersGrow) * trend.per_step ||
                                evidence_.accused.contains(origin));
    if (larger && !one) {
      doubtful_.push_back(origin);
      if (work <= kLeads * trend.per_step) {
        leading_.push_back(origin);
      }
    }
    if (lasts || one) {
      std::ranges::transform(lasting_, bytes, lasting_.begin(), std::plus<>{});
    }
    if (!trend.grows) {
      return;
    }
    if (!one && !(lasts && older_and_older(cuts, trend))) {
      if (lasts && rises_by_chance(bytes, full_since(cuts, trend))) {
        std::ranges::transform(varying_, bytes, varying_.begin(), std::plus<>{});
      }
      return;
    }
    found_.push_back(suspect(origin, cuts, trend));
    found_.back().one = one;
  }

  Suspect suspect(OriginId origin, std::span<const Cut> cuts, const Trend& trend) const {
    const auto& last = last_until(cuts, rows_.back().step);
    return {.origin = origin,
            .per_step = trend.per_step / steps_per_row(rows_),
            .confidence = trend.confidence,
            .bytes = last.bytes,
            .count = last.count,
            .since = rows_[trend.since].step};
  }

  // Where bytes accuse nobody.
  void add_graphs(const Cuts& cuts) {
    for (const auto& [origin, kept] : evidence_.graphs) {
      const auto series = cuts.find(origin);
      if (kept.per_step >= kLeastHeld && series != cuts.end()) {
        found_.push_back({.origin = origin,
                          .per_step = kept.per_step,
                          .confidence = kSure,
                          .bytes = kept.bytes,
                          .count = last_until(series->second, rows_.back().step).count,
                          .since = kept.since});
      }
    }
  }

  // Together they grow, but none at a steady pace of its own: those with a large share in it.
  void find_contributors(const Cuts& cuts, const Trend& all) {
    const auto grown_by = lasting_.back() - lasting_[all.since];
    if (!all.grows || grown_by <= 0) {
      return;
    }
    Series accused(rows_.size());
    for (const auto& [origin, series] : cuts) {
      const auto bytes = at_rows(rows_, series, &Cut::bytes);
      const auto grown = bytes.back() - bytes[all.since];
      if (most_births(series) >= kManySteps && grown >= kLargeShare * grown_by &&
          older_and_older(series, all)) {
        std::ranges::transform(accused, bytes, accused.begin(), std::plus<>{});
        found_.push_back(suspect(origin, series, all));
        found_.back().per_step *= grown / grown_by;
      }
    }
    // What the others do is no evidence against these.
    if (!trend_of(accused, {.least_per_step = kLeastHeld}).grows) {
      found_.clear();
    }
  }

  // Whether those alive come from ever more steps, to the end: a cache is full at some time.
  bool older_and_older(std::span<const Cut> cuts, const Trend& trend) const {
    const auto all = at_rows(rows_, cuts, &Cut::birth_steps);
    const auto births = std::span(all).subspan(trend.since);
    const auto late = births[births.size() * 2 / 3];
    return births.back() - births.front() >= 3 && births.back() > late && slope_of(births) > 0;
  }

  // Note [Sizes that vary]
  // Of a cache that is full each storage takes another's place, and is larger or smaller. The sum
  // wanders, slowly if the cache is large, and over a short run that looks like a trend. But it
  // rises as often as it falls, while things that really become larger rise more often.
  static bool rises_by_chance(const Series& bytes, size_t since) {
    double rises = 0;
    double falls = 0;
    for (size_t i = since + 1; i < bytes.size(); ++i) {
      rises += bytes[i] > bytes[i - 1] ? 1 : 0;
      falls += bytes[i] < bytes[i - 1] ? 1 : 0;
    }
    return rises - falls <= kByChance * std::sqrt(rises + falls);
  }

  // From where on as many are alive as at the end.
  size_t full_since(std::span<const Cut> cuts, const Trend& trend) const {
    const auto births = at_rows(rows_, cuts, &Cut::birth_steps);
    const auto from = births.begin() + static_cast<std::ptrdiff_t>(trend.since);
    const auto full =
        std::find_if(from, births.end(), [&](double alive) { return alive >= births.back(); });
    return static_cast<size_t>(full - births.begin());
  }

  std::span<const StepRow> rows_;
  const Evidence& evidence_;
  std::vector<OriginId> doubtful_, leading_;
  Series born_;     // bytes, in each step
  Series lasting_;  // bytes of all origins that have storages of many steps
  Series varying_;  // bytes of those that grow by chance: Note [Sizes that vary]
  std::vector<Suspect> found_, filling_;
};

double known(const std::optional<int64_t>& value) { return static_cast<double>(value.value_or(0)); }

double total_of(const StepRow& row) {
  return static_cast<double>(row.rss) - known(row.files) + known(row.children) +
         known(row.in_memory) + known(row.device_used);
}

// A part of the memory, and the least growth of it that is spoken of.
struct Place {
  const char* name;
  double least;  // bytes a step
  double share;  // of the process, since the growth began
  double (*bytes)(const StepRow& row);
  double own = 0;      // share of what the part was at first, over the run
  bool hides = false;  // what an allocator that is not malloc keeps
};

constexpr Place kTotal{"the process", kLeastSeen, kLeastReserve, &total_of, 0, true};
constexpr Place kPeak{"peak", kLeastCounted, 0,
                      [](const StepRow& row) { return static_cast<double>(row.peak); }, kLeastWork};
// Pages shared with other processes are in `rss` too, and so is pinned memory.
constexpr std::array kPlaces{
    Place{"held", kLeastHeld, 0, [](const StepRow& row) { return static_cast<double>(row.held); }},
    Place{"allocator", kLeastSeen, kLeastReserve,
          [](const StepRow& row) {
            return known(row.heap_free) + known(row.device_reserved) - known(row.device_allocated);
          }},
    Place{"torch's CPU allocator", kLeastSeen, kLeastReserve,
          [](const StepRow& row) { return known(row.reserve); }, 0, true},
    Place{"pinned cache", kLeastCounted, kLeastShare,
          [](const StepRow& row) { return known(row.pinned); }},
    Place{"other host heap", kLeastCounted, kLeastHeap,
          [](const StepRow& row) { return known(row.heap); }},
    Place{"shared memory", kLeastCounted, kLeastShare,
          [](const StepRow& row) { return known(row.shared); }},
    Place{"child processes", kLeastSeen, kLeastShare,
          [](const StepRow& row) { return known(row.children); }},
    Place{"files in memory", kLeastSeen, kLeastShare,
          [](const StepRow& row) { return known(row.in_memory); }},
    Place{"device memory outside torch", kLeastSeen, kLeastShare,
          [](const StepRow& row) { return known(row.device_used) - known(row.device_reserved); }},
};

// How a part grows, and whether that is sure and large enough to speak of.
Share share_of(const Place& place, std::span<const StepRow> rows, size_t since) {
  const auto values = series_of(rows, place.bytes);
  if (std::ranges::all_of(values, [&](double value) { return value == values.front(); })) {
    return {.name = place.name};
  }
  const auto trend = trend_of(values, {.least_per_step = place.least});
  const auto grown = trend.per_step * static_cast<double>(values.size() - trend.since);
  auto least = std::min(kLeastBytes, place.share * total_of(rows[trend.since]));
  if (place.hides && rows.back().reserve) {
    least = std::max(least, kHiddenReserve);
  }
  const auto pace = slope_of(std::span(values).subspan(since));
  const bool matters = pace * static_cast<double>(values.size()) >= place.own * values.front();
  return {.name = place.name,
          .per_step = pace / steps_per_row(rows),
          .grows = trend.grows && grown >= least && matters,
          .confidence = trend.confidence};
}

// See Note [Sizes that vary].
void unless_it_varies(Share& share, const Place& place, std::span<const StepRow> rows,
                      const Series& varying) {
  if (!share.grows || std::ranges::all_of(varying, [](double bytes) { return bytes == 0; })) {
    return;
  }
  auto rest = series_of(rows.first(varying.size()), place.bytes);
  std::ranges::transform(rest, varying, rest.begin(), std::minus<>{});
  share.grows = trend_of(rest, {.least_per_step = place.least}).grows;
}

std::string size_text(double bytes) {
  const bool large = std::abs(bytes) >= 5e4;
  const auto tenths = std::llround(std::abs(bytes) / (large ? 1e5 : 1e2));
  return text(bytes < 0 ? "-" : "+", tenths / 10, ".", tenths % 10, large ? " MB" : " kB");
}

const Share* fastest(const Verdict& verdict) {
  const Share* most = verdict.total.grows ? &verdict.total : nullptr;
  for (const auto& share : verdict.shares) {
    if (share.grows &&
        (most == nullptr || most == &verdict.total || share.per_step > most->per_step)) {
      most = &share;
    }
  }
  return most == nullptr && verdict.peak.grows ? &verdict.peak : most;
}

// What the allocator keeps more of because a step's peak gets higher is not its own growth.
void add_larger_inputs(Verdict& verdict) {
  auto& held = verdict.shares[0];
  Share larger{.name = "larger inputs"};
  if (verdict.peak.grows && verdict.suspects.empty()) {
    auto most = std::max(0.0, verdict.peak.per_step - std::max(0.0, held.per_step));
    for (auto& allocator : std::span(verdict.shares).subspan(1, 2)) {  // malloc, and torch's own
      const auto part = std::clamp(allocator.per_step, 0.0, most);
      larger.per_step += part;
      allocator.per_step -= part;
      most -= part;
    }
  }
  verdict.shares.push_back(larger);
}

void add_unexplained(Verdict& verdict) {
  double explained = 0;
  for (const auto& share : verdict.shares) {
    explained += share.per_step;
  }
  verdict.shares.push_back({.name = "unexplained", .per_step = verdict.total.per_step - explained});
}

void explain(Verdict& verdict) {
  const auto* most = fastest(verdict);
  if (!verdict.suspects.empty()) {
    verdict.judgement = Judgement::leak;
    verdict.since = verdict.suspects.front().since;
    verdict.confidence = verdict.suspects.front().confidence;
    verdict.per_step = growth_of(verdict.suspects);
    verdict.why = text("storages made in ever more steps stay alive: ", size_text(verdict.per_step),
                       " a step");
  } else if (most != nullptr) {
    verdict.judgement = Judgement::growth;
    verdict.per_step =
        verdict.total.grows ? std::max(most->per_step, verdict.total.per_step) : most->per_step;
    verdict.confidence = most->confidence;
    const bool held = most == &verdict.total || std::string_view(most->name) == "held";
    const bool work = verdict.peak.grows && (most == &verdict.peak || !most->grows || held ||
                                             std::string_view(most->name) == "allocator");
    if (!verdict.filling.empty() && held) {
      verdict.why = text("something that has a bound fills, by ",
                         size_text(growth_of(verdict.filling)), " a step until it is full");
    } else if (work) {
      verdict.why = text("a step needs more memory each time (larger inputs): its peak grows by ",
                         size_text(verdict.peak.per_step), " a step");
    } else {
      verdict.why = text("it is in ", most->name, ", ", size_text(most->per_step),
                         " a step, and no storage that is known to last explains it");
    }
  } else {
    verdict.judgement = Judgement::flat;
    verdict.why = "no part of the memory grows for good";
  }
}

}  // namespace

const char* judgement_name(Judgement judgement) {
  constexpr std::array names{"flat", "leak", "growth", "too-short"};
  return names.at(static_cast<size_t>(judgement));
}

Verdict judge(std::span<const StepRow> rows, const Cuts& cuts, Unit unit,
              const Evidence& evidence) {
  Verdict verdict;
  verdict.steps = rows.size();
  if (rows.size() < kFewestSteps + kWarmUp) {
    verdict.why =
        text("at least ", kFewestSteps + kWarmUp, " are needed to tell growth from warm-up");
    return verdict;
  }
  rows = rows.subspan(kWarmUp);
  std::vector<StepRow> even;
  if (are_uneven(rows)) {
    even = evenly(rows);
    rows = even;
  }
  if (unit == Unit::interval) {
    rows = without_the_end(rows);
  }
  verdict.steps = rows.back().step - rows.front().step + 1 + kWarmUp;
  const auto each = steps_per_row(rows);
  verdict.seconds_per_step =
      (rows.back().seconds - rows.front().seconds) / (each * static_cast<double>(rows.size() - 1));
  Suspects suspects(until_last_cut(rows, cuts), cuts, evidence);
  verdict.doubtful = suspects.doubtful();
  verdict.leading = suspects.leading();
  verdict.suspects = suspects.take();
  verdict.filling = suspects.take_filling();

  const auto seen = trend_of(series_of(rows, total_of), {.least_per_step = kLeastSeen});
  size_t since = seen.grows ? seen.since : rows.size() / 3;
  if (!verdict.suspects.empty()) {
    since = static_cast<size_t>(
        std::ranges::lower_bound(rows, verdict.suspects.front().since, {}, &StepRow::step) -
        rows.begin());
  }
  verdict.since = rows[since].step;
  verdict.total = share_of(kTotal, rows, since);
  for (const auto& place : kPlaces) {
    verdict.shares.push_back(share_of(place, rows, since));
  }
  verdict.peak = share_of(kPeak, rows, since);
  unless_it_varies(verdict.shares.front(), kPlaces.front(), rows, suspects.varying());
  unless_it_varies(verdict.peak, kPeak, rows, suspects.varying());
  add_larger_inputs(verdict);
  add_unexplained(verdict);
  explain(verdict);
  if (unit == Unit::interval && verdict.judgement == Judgement::growth &&
      rows.back().seconds < kStartUp) {
    verdict.judgement = Judgement::too_short;
    verdict.why = text("no steps were announced, and ", std::llround(rows.back().seconds),
                       " seconds are too few to tell growth from the program's beginning: call "
                       "tenure.step() at the end of each step");
  }
  return verdict;
}

}  // namespace tenure::inspect
