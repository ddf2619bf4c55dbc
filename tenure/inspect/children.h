// The memory of a process's children, theirs included: what DataLoader workers and other helpers
// hold. Any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tenure::inspect {

// Its children and theirs. Looks at every process of the machine.
std::vector<pid_t> children_of(pid_t process);

// Resident bytes that are not mapped from files or shared; a process that is gone has none.
int64_t private_bytes(std::span<const pid_t> processes);

}  // namespace tenure::inspect
