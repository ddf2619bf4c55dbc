#include <tenure/train/spare_heap.h>

#include <cstdlib>  // where glibc says that it is there

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace tenure::train {
namespace {

constexpr int64_t kPart = 32;  // growth by one of so many parts is much

}  // namespace

bool SpareHeap::step_ended(int64_t resident) {
#ifdef __GLIBC__
  if (begun_ && !base_) {
    base_ = resident;
  }
  if (base_ && resident - *base_ <= *base_ / kPart) {
    return false;
  }
  ::malloc_trim(0);
  begun_ = true;
  base_.reset();
  return true;
#else
  return false;
#endif
}

}  // namespace tenure::train
