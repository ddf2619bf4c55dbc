// Recorded: what judging needs of a recording that some process wrote, read back. Reads one file
// and keeps nothing open; any thread, several at once.
#pragma once

#include <tenure/inspect/step_row.h>
#include <tenure/inspect/verdict.h>

#include <string>
#include <vector>

namespace tenure::inspect {

struct Recorded {
  std::vector<StepRow> rows;
  Cuts cuts;
};

// Throws Error with the database's own words if the file is no recording or is damaged, and in a
// build without SQLite.
Recorded read_recording(const std::string& path);

}  // namespace tenure::inspect
