// What inspect tells the other parts, through core's registry.
#pragma once

namespace tenure::inspect {

// For the life of the process; later calls do nothing.
void register_inspect();

}  // namespace tenure::inspect
