#include <tenure/store/collectors.h>

#include <tenure/core/text.h>

namespace tenure::store {

std::string collector_text(const Collector& collector) {
  if (!collector.role.empty() && collector.rank) {
    return text(collector.role, ' ', *collector.rank);
  }
  if (!collector.role.empty()) {
    return "any " + collector.role;
  }
  return collector.rank ? text("rank ", *collector.rank) : "anyone";
}

}  // namespace tenure::store
