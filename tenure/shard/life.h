// Life: what a unit's gathered parameters are at a moment, and how that may change.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tenure::shard {

enum class Life : uint8_t {
  sharded,    // nobody has used it yet: each rank has its piece, and nothing is gathered
  gathering,  // memory is there, and the collective that fills it runs
  ready,      // whole, for any reader
  released,   // the memory is gone; whoever reads it gets the error of core
};

constexpr std::string_view name_of(Life life) {
  constexpr std::array<std::string_view, 4> names{"sharded", "gathering", "ready", "released"};
  return names.at(static_cast<size_t>(life));
}

// All legal moves. A gather that fails or is not wanted any more ends in `released`.
constexpr bool may_become(Life from, Life to) {
  switch (from) {
    case Life::sharded:
    case Life::released:
      return to == Life::gathering;
    case Life::gathering:
      return to == Life::ready || to == Life::released;
    case Life::ready:
      return to == Life::released;
  }
  return false;
}

}  // namespace tenure::shard
