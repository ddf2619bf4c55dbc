// The memory of a process's children, theirs included: what DataLoader workers and other helpers
// hold. Any thread; takes some milliseconds on a machine with many processes.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

namespace tenure::inspect {

// Resident bytes that are not mapped from files or shared. Absent: the process has no children.
std::optional<int64_t> bytes_of_children(pid_t process);

}  // namespace tenure::inspect
