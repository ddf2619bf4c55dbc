// What offloading did: of the last whole step where not said otherwise. Plain data.
#pragma once

#include <tenure/offload/action.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace tenure::offload {

// How a step is run.
enum class Mode : uint8_t {
  measuring,  // one thing at a time: what the planner needs to know
  planned,    // as the planner said
  proving,    // the same, and what is made again for the first time is compared with what it was
  following,  // shapes that no plan is for: all goes, and comes back in reverse order
};
std::string_view mode_name(Mode mode);

struct Count {
  uint64_t count = 0;
  uint64_t bytes = 0;
};

struct Stats {
  uint64_t steps = 0;  // so far
  Mode mode = Mode::measuring;
  Count saved;      // storages that autograd saved and that could go
  Count moved_out;  // to the host
  Count moved_in;   // and back
  Count reused;     // needed back before they had left the device
  Count dropped;    // to be made again
  Count remade;     // calls that made them again, and what else they took; of what was made
  std::array<Count, kKeptReasons> kept;
  uint64_t host_bytes = 0;       // held on the host now
  uint64_t most_host_bytes = 0;  // at once
  uint64_t pinned_bytes = 0;     // taken from the system now
  uint64_t slabs_taken = 0;      // ever
  uint64_t disk_bytes = 0;       // on disk now
  uint64_t file_bytes = 0;       // of the file there, which has room for them
  uint64_t tracked = 0;          // storages known now
  double exposed_seconds = 0;    // the device waited for copies; of the last step that was timed
  double out_bandwidth = 0;      // bytes a second
  double in_bandwidth = 0;
  int64_t peak = 0;      // allocated on the device
  int64_t promised = 0;  // by the plan
  int64_t least = 0;     // that any budget could be; 0: not known yet
  int64_t budget = 0;    // 0: none
  int64_t risen = 0;     // levels at begin since the measured step, where they rise again and again
  uint64_t audited = 0;  // compared with what they were; so far
  std::string diverged;  // why the step did not follow its plan; empty: it did
};

// For a person: a few lines.
std::string stats_text(const Stats& stats);

}  // namespace tenure::offload
