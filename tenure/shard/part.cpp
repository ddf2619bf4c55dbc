#include <tenure/shard/part.h>

namespace tenure::shard {

at::Tensor part(const at::Tensor& tensor, Range range) {
  return tensor.narrow(0, static_cast<int64_t>(range.begin), static_cast<int64_t>(range.size));
}

}  // namespace tenure::shard
