// What sharding did. Plain data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tenure::shard {

struct UnitStats {
  std::string name;
  uint64_t bytes = 0;    // gathered
  uint64_t gathers = 0;  // ever
  uint64_t ahead = 0;    // of those, the ones that were begun before the unit was needed
  uint64_t reduces = 0;  // sums of its gradients over ranks, ever
  double waited = 0;     // seconds that the host waited for gathers
  double moving = 0;     // seconds from the begin of gathers until they were waited for and done
  double lag = 0;        // seconds between last uses and their releases
};

struct Stats {
  uint64_t passes = 0;
  uint64_t order_changes = 0;
  uint64_t piece_bytes = 0;     // of parameters, on this rank
  uint64_t gathered_bytes = 0;  // now
  // Of the pass before this one.
  uint64_t peak_gathered = 0;  // most bytes gathered at once
  uint64_t peak_needed = 0;    // most bytes of units in use at once: no order of releases does less
  uint64_t moved_bytes = 0;    // gathered in total
  uint64_t reduced_bytes = 0;
  double waited = 0;  // seconds that the host waited for gathers
  double lag = 0;     // seconds between last uses and releases, added up
  std::vector<UnitStats> units;

  // 1 is the least possible.
  double excess() const {
    return peak_needed == 0 ? 1
                            : static_cast<double>(peak_gathered) / static_cast<double>(peak_needed);
  }
};

// Several lines: all units together, then a table of them.
std::string stats_text(const Stats& stats);

}  // namespace tenure::shard
