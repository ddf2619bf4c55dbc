// Freeing a storage's data in place, and giving it back.
//
// Note [Release is about the storage]
// A tensor is one of many names for a storage: views, autograd's saved tensors and other people's
// aliases are others. Dropping a tensor frees nothing while one of them lives. Here the data of the
// StorageImpl itself goes, while its size, and every alias with its shape and version, stays. From
// then on a read through any alias raises a text that was written at release; refilling makes every
// alias good again, without a version bump, so that autograd accepts its saved tensors.
//
// Any thread may call; that nobody reads the data at the same time is the caller's promise, and a
// fence is how to keep it across streams.
//
// What was exported through DLPack (np.from_dlpack, torch.from_dlpack) is not seen: PyTorch keeps
// no trace of an export, its reader has the address and not the storage, and reads freed memory
// without an error. That no such reader is left is the caller's promise too.
#pragma once

#include <tenure/core/fence.h>

#include <optional>
#include <string>

namespace at {
class Tensor;
}  // namespace at
namespace c10 {
struct Storage;
}  // namespace c10

namespace tenure {

// Who frees it, for the error of a later reader.
struct Releaser {
  std::string name;  // "shard", "user"
  std::string site;  // "train.py:41"
};

// Frees the data of the tensor's storage; the memory itself goes when the fence is ready. Throws
// UseAfterRelease if it is released already, ReleaseError if the memory is not the storage's to
// free (shared, mapped, external, copy-on-write, not resizable), LeaseError if there is no storage.
void release_storage(const at::Tensor& tensor, const Releaser& by, const Fence& fence = {});

// New memory of the same size, with whatever is in it. Throws ReleaseError if it was not released.
void refill_storage(const at::Tensor& tensor);
// The same, then copies `content`, which must have as many bytes and be on the same device. By
// value where it has the tensor's sizes and the tensor is all of its storage, so that the two are
// equal whatever their strides; else its bytes, in its own row-major order, from the storage's
// begin.
void refill_storage(const at::Tensor& tensor, const at::Tensor& content);

bool is_released(const c10::Storage& storage);
// The text that a reader gets; nothing for a storage that has its data.
std::optional<std::string> released_text(const c10::Storage& storage);
// Whether it has a size and yet no data, other than because it was released: what wrapper
// subclasses (DTensor), functional tensors and zero tensors have for a storage.
bool never_had_data(const c10::Storage& storage);
// Throws UseAfterRelease with that text.
void require_data(const c10::Storage& storage);

}  // namespace tenure
