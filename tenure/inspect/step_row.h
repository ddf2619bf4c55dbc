// StepRow: a process's memory at the end of one step, as the allocators and the operating system
// see it. Bytes; a figure that is not known is absent.
#pragma once

#include <cstdint>
#include <optional>

namespace tenure::inspect {

struct StepRow {
  uint64_t step = 0;
  double seconds = 0;                               // since watching began
  int64_t held = 0;                                 // storages alive
  int64_t peak = 0;                                 // most of that during the step
  uint64_t births = 0, born_bytes = 0, deaths = 0;  // during the step
  int64_t rss = 0;
  std::optional<int64_t> files;   // part of rss that the kernel may drop at any time
  std::optional<int64_t> shared;  // part of rss: shared memory that is no storage's
  std::optional<int64_t> pss, cgroup, children;
  std::optional<int64_t> in_memory;  // files in memory that no process need have mapped: /dev/shm
  std::optional<int64_t> heap;       // malloc'ed or an interpreter's, and no storage's memory
  std::optional<int64_t> heap_free;  // malloc keeps it for later: Note [Kept on paper]
  // Where storages are not malloc's: what neither malloc nor a storage has. Their allocator does
  // not tell what it keeps, and that is in it.
  std::optional<int64_t> reserve;
  std::optional<int64_t> pinned;
  std::optional<int64_t> device_used, device_reserved, device_allocated;
};

// Calls visit(name, figure) for each of a row, in the order of the table `steps`.
template <class Row, class Visit>
void each_figure(Row& row, const Visit& visit) {
  visit("step", row.step);
  visit("seconds", row.seconds);
  visit("held", row.held);
  visit("peak", row.peak);
  visit("births", row.births);
  visit("born_bytes", row.born_bytes);
  visit("deaths", row.deaths);
  visit("rss", row.rss);
  visit("files", row.files);
  visit("pss", row.pss);
  visit("shared", row.shared);
  visit("cgroup", row.cgroup);
  visit("children", row.children);
  visit("in_memory", row.in_memory);
  visit("heap", row.heap);
  visit("heap_free", row.heap_free);
  visit("reserve", row.reserve);
  visit("pinned", row.pinned);
  visit("device_used", row.device_used);
  visit("device_reserved", row.device_reserved);
  visit("device_allocated", row.device_allocated);
}

}  // namespace tenure::inspect
