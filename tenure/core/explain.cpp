#include <tenure/core/explain.h>

#include <tenure/core/ledger.h>
#include <tenure/core/part.h>
#include <tenure/core/release.h>
#include <tenure/core/text.h>
#include <tenure/core/ticks.h>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace tenure {

Explanation explain(const at::Tensor& tensor) {
  const auto& storage = storage_of(tensor, "explained");
  Explanation out{.storage = StorageRef(storage), .leases = {}, .held_by = {}, .released = {}};
  out.nbytes = storage.nbytes();
  out.references = storage.use_count();
  auto& book = ledger();
  book.sweep();
  out.leases = book.leases().rows_of(storage.unsafeGetStorageImpl());
  std::ranges::reverse(out.leases);  // they come newest first
  for (const auto& part : parts()) {
    if (part->holders) {
      for (auto& line : part->holders(out.storage)) {
        out.held_by.push_back(text(part->name, ": ", line));
      }
    }
  }
  out.released = released_text(storage);
  return out;
}

std::string Explanation::text() const {
  auto out = tenure::text(storage.text(), ": ", count_text(references, "reference"));
  out +=
      tenure::text(", ", leases.size(), " by Tenure, ", others(), " by tensors and other code\n");
  const auto now = coarse_nanoseconds();
  for (const auto& lease : leases) {
    std::array<char, 32> age{};
    std::snprintf(age.data(), age.size(), "%.1f s", static_cast<double>(now - lease.taken) / 1e9);
    out += tenure::text("  leased to ", owner_text(lease.owner), " in scope '",
                        ledger().scopes().path(lease.scope), "' for ", age.data(), "\n");
  }
  for (const auto& line : held_by) {
    out += tenure::text("  ", line, "\n");
  }
  if (released) {
    out += tenure::text("  its data is gone: ", *released, "\n");
  }
  out.pop_back();
  return out;
}

}  // namespace tenure
