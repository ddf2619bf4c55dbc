// RecentPuts: which storages of this process lie in the store, so that a tensor that is put twice
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
  // The latest object that the same elements of the storage were put as, if torch has seen no write
  // since. Writes that torch does not see are the caller's to find: it compares the bytes.
  std::optional<ObjectId> find(const at::Tensor& tensor);

 private:
  struct Put {
    ObjectId id;
    uint32_t version = 0;
    at::ScalarType type = at::ScalarType::Undefined;
    int64_t offset = 0;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;

    bool operator==(const Put& other) const;
  };
  static Put put_of(const at::Tensor& tensor, ObjectId id);

  std::mutex mutex_;
  std::unordered_map<StorageRef, std::vector<Put>> puts_;
  size_t sweep_at_ = 256;
};

}  // namespace tenure::store
