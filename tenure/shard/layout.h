// Layout: where the parameters of a unit lie in its flat buffer, and which part of it each rank
// keeps. Counted in elements. Pure functions of plain data.
//
// Note [One flat buffer]
// The parameters of a unit lie one after the other in one buffer, each in its true shape, and every
// rank keeps one contiguous piece of it, all of the same size. So one collective gathers a unit,
// straight into the memory that its parameters are views of: nothing is copied out afterwards, and
// nothing but this one storage can keep the gathered bytes alive. The price: a rank's piece begins
// and ends anywhere, and a rank may hold nothing of a small parameter.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tenure::shard {

struct Range {
  uint64_t begin = 0;
  uint64_t size = 0;

  uint64_t end() const { return begin + size; }
  bool operator==(const Range&) const = default;
};

struct Layout {
  std::vector<Range> parameters;  // in the flat buffer
  uint64_t size = 0;              // of the flat buffer, padding included: the same on every rank
  uint32_t ranks = 1;

  uint64_t shard_size() const { return size / ranks; }
  // The piece of the flat buffer that a rank keeps.
  Range shard(uint32_t rank) const { return {rank * shard_size(), shard_size()}; }
  // What a rank keeps of a parameter, counted from the parameter's begin. Size 0: nothing.
  Range held(size_t parameter, uint32_t rank) const;
};

// Parameters and pieces begin at multiples of `alignment` elements. REQUIRES ranks, alignment >= 1.
Layout lay_out(std::span<const uint64_t> sizes, uint32_t ranks, uint64_t alignment);

}  // namespace tenure::shard
