#include <tenure/shard/layout.h>

#include <algorithm>

namespace tenure::shard {
namespace {

uint64_t rounded_up(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

}  // namespace

Range Layout::held(size_t parameter, uint32_t rank) const {
  const auto& whole = parameters[parameter];
  const auto mine = shard(rank);
  const auto begin = std::max(whole.begin, mine.begin);
  const auto end = std::min(whole.end(), mine.end());
  return begin < end ? Range{begin - whole.begin, end - begin} : Range{};
}

Layout lay_out(std::span<const uint64_t> sizes, uint32_t ranks, uint64_t alignment) {
  Layout out;
  out.ranks = ranks;
  uint64_t at = 0;
  for (const auto size : sizes) {
    out.parameters.push_back({at, size});
    at = rounded_up(at + size, alignment);
  }
  out.size = rounded_up(std::max<uint64_t>(at, 1),
                        alignment * ranks);  // a storage of no bytes has no life
  return out;
}

}  // namespace tenure::shard
