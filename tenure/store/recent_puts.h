// RecentPuts: which elements of this process's storages lie in the store, so that what is put twice
// is stored once. Weak: it keeps nothing alive. Any thread.
#pragma once

#include <tenure/core/storage_ref.h>
#include <tenure/store/identity.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace tenure::store {

class RecentPuts {
 public:
  void note(const at::Tensor& tensor, ObjectId id);
  // The latest object that the same elements of the storage were put as, in the same order and in
  // whatever shape, if torch has seen no write since. It is the caller's to compare the bytes:
  // torch does not see every write, and none to inference tensors.
  std::optional<ObjectId> find(const at::Tensor& tensor);

 private:
  // Of a storage. Contiguous elements are a range of bytes; others are known by a hash of the way
  // in which they lie.
  struct Part {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t lie = 0;

    auto operator<=>(const Part&) const = default;
  };
  struct Put {
    Part part;
    ObjectId id;
    uint32_t version = 0;
  };
  static Part part_of(const at::Tensor& tensor);

  std::mutex mutex_;
  std::unordered_map<StorageRef, std::vector<Put>> puts_;  // of each, in the order of its parts
  size_t sweep_at_ = 256;
};

}  // namespace tenure::store
