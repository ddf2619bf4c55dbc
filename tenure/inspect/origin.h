// Origin: what storages have in common that the same code made. Interned, so that a birth carries
// four bytes of it and storages are grouped by comparing numbers. Any thread.
#pragma once

#include <tenure/core/names.h>
#include <tenure/core/where.h>

#include <compare>
#include <cstdint>
#include <vector>

namespace tenure::inspect {

struct Origin {
  NameId op = NameId::none;            // "aten::mm"
  NameId site = NameId::none;          // "train.py:41 main": innermost frame of the user's
  NameId forward_site = NameId::none;  // of a storage born in backward: where its node was made
  NameId stack = NameId::none;         // level deep: all frames, innermost first
  uint32_t module = 0;                 // see modules.h; 0: none
  Phase phase = Phase::other;
  uint16_t device = 0;         // as in LeaseRow
  bool communication = false;  // made to speak with other processes

  friend auto operator<=>(const Origin&, const Origin&) = default;
};

enum class OriginId : uint32_t { unknown = 0 };

OriginId intern(const Origin& origin);
Origin origin_of(OriginId id);
// How many there are: ids lie below it.
uint32_t origins();

}  // namespace tenure::inspect
