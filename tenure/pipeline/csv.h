// CSV: schedules as torch.distributed.pipelining writes and reads them: a row a rank, a cell an
// action ("0F3", "1B0", "1I0", "1W0") or empty. Pure; any thread.
#pragma once

#include <tenure/pipeline/schedule.h>

#include <string>
#include <string_view>

namespace tenure::pipeline {

// Cells of what follows from a schedule here (SEND_F, RECV_B, UNSHARD, REDUCE_GRAD, ...) are passed
// over; "(0F1;1B0)OVERLAP_F_B" is its actions one after the other. Throws InputError naming the row
// and the cell, also for a schedule that check() refuses.
Schedule from_csv(std::string_view csv, std::string_view name);

// Without empty cells.
std::string to_csv(const Schedule& schedule);

}  // namespace tenure::pipeline
