// The processes around a process: the memory of its children, theirs included, which is what
// DataLoader workers and other helpers hold, and whom it shares its memory group with. Any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tenure::inspect {

// Its children and theirs. Where the kernel does not name them it looks at every process there is.
std::vector<pid_t> children_of(pid_t process);

// Resident bytes that are not mapped from files or shared; a process that is gone has none.
int64_t private_bytes(std::span<const pid_t> processes);

// Whether all that is charged to this process's memory group is its doing: nobody is in the group
// but itself, what it started (`children`) and what started it.
bool has_group_alone(std::span<const pid_t> children);

}  // namespace tenure::inspect
