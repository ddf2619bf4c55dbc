// explain: what Tenure knows of one storage. Any thread.
#pragma once

#include <tenure/core/lease_table.h>
#include <tenure/core/storage_ref.h>

#include <optional>
#include <string>
#include <vector>

namespace tenure {

struct Explanation {
  StorageRef storage;
  uint64_t nbytes = 0;
  // All strong references to the storage, whoever has them: tensors and their views, autograd,
  // Tenure's leases, other code. Without the one that explain itself needed.
  uint64_t references = 0;
  std::vector<LeaseRow> leases;         // oldest first
  std::vector<std::string> held_by;     // what parts say of it
  std::optional<std::string> released;  // the text a reader gets, if its data is gone

  // References that no lease explains.
  uint64_t others() const { return references > leases.size() ? references - leases.size() : 0; }
  std::string text() const;
};

Explanation explain(const at::Tensor& tensor);

}  // namespace tenure
