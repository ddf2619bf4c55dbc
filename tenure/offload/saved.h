// What offload knows of a saved storage, and of each saved tensor that is a view of it.
#pragma once

#include <tenure/core/fence.h>
#include <tenure/core/lease.h>
#include <tenure/core/storage_ref.h>
#include <tenure/offload/action.h>
#include <tenure/offload/disk.h>
#include <tenure/offload/host_copy.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

namespace tenure::offload {

class Session;
class State;

// A range of a storage at one version: all that is saved of it shares one of these. Guarded by the
// session's lock, but for its end, which may come on any thread.
//
// Where its content is, in the order in which backward looks:
//   on board   a storage on the device that is alive: the saved one, or one that was fetched
//   coming     `fetched` is leased and `arrived` not ready
//   away       only `host`
struct SavedStorage {
  SavedStorage(const c10::Storage& storage, c10::Stream stream);
  ~SavedStorage();
  SavedStorage(const SavedStorage&) = delete;
  SavedStorage& operator=(const SavedStorage&) = delete;

  StorageRef original;
  uint32_t version = 0;
  size_t begin = 0;  // the range, in bytes of the original
  size_t bytes = 0;
  c10::Stream compute;  // on which it was saved
  OwnerId on_device{};
  OwnerId on_host{};
  size_t index = 0;  // in its step
  uint64_t step = 0;
  Action action = Action::offload;
  uint32_t uses = 0;  // how often backward has asked for it

  Lease kept;                        // Action::keep
  HostCopy host;                     // Action::offload, in memory
  std::shared_ptr<Disk::Rest> rest;  // or on disk; shared with the threads that write and read it
  Fence left;                        // the copy to the host
  StorageRef on_board;               // what was fetched last, or nothing
  Lease fetched;                     // until backward asks for it, or for as long as it stays
  Fence arrived;                     // the copy from the host
};

// A saved tensor, in autograd's hands until the graph goes. Any thread may drop it.
class Saved {
 public:
  Saved() = default;
  explicit Saved(const at::Tensor& tensor);

 private:
  friend class Session;
  friend class State;
  // REQUIRES a plain tensor: others have no sizes that a view could be made from.
  void remember_view(const at::Tensor& tensor);
  void require_unchanged() const;
  at::Tensor view_of(c10::Storage storage, size_t begin) const;

  std::shared_ptr<State> state_;           // shared: backward may run after the session has ended
  std::shared_ptr<SavedStorage> storage_;  // shared by the views of one storage
  at::Tensor passed_;                      // autograd's own, where nothing is done with it

  c10::VariableVersion counter_;  // no reference to the storage
  uint32_t version_ = 0;
  c10::SmallVector<int64_t, 5> sizes_;
  c10::SmallVector<int64_t, 5> strides_;
  size_t offset_ = 0;  // in bytes
  c10::ScalarType dtype_ = c10::ScalarType::Undefined;
  bool conj_ = false;
  bool neg_ = false;
};

}  // namespace tenure::offload
