// Modules: numbers for the nn.Modules in whose calls storages are born. A birth knows a module by
// its address only, for it may not touch Python objects; whoever may gives it a name later, and
// says when it is gone, so that another module at the same address is another module. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tenure::inspect {

// 0 for null.
uint32_t module_number(const void* module);

// Numbers without a name, with their addresses: the module may be gone by now.
std::vector<std::pair<uint32_t, const void*>> unnamed_modules();
// An empty name: nobody will ever know.
void name_module(uint32_t number, std::string name);
void forget_module(const void* module);
// "model.layers.3.mlp", or empty.
std::string module_name(uint32_t number);

}  // namespace tenure::inspect
