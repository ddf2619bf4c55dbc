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
struct Value;

// A storage may have several version counters: x.data and the parts that unsafe_chunk() makes have
// their own. Which one a tensor has is a part of what it is known by.
class Version {
 public:
  Version() = default;
  explicit Version(const at::Tensor& tensor);

  bool is_current() const { return !counter_.enabled() || now() == number_; }
  void look_again() { number_ = counter_.enabled() ? now() : 0; }
  uint32_t number() const { return number_; }
  uint32_t now() const { return counter_.current_version(); }
  const c10::VariableVersion& counter() const { return counter_; }
  // Of the same counter, at the same number. Without a counter nothing is known to be the same.
  bool operator==(const Version& other) const;

 private:
  c10::VariableVersion counter_;  // no reference to the storage
  uint32_t number_ = 0;
};

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
  size_t original_bytes = 0;
  Version version;
  size_t begin = 0;  // the range, in bytes of the original
  size_t bytes = 0;
  c10::Stream compute;  // on which it was saved
  OwnerId on_device{};
  OwnerId on_host{};
  size_t index = 0;  // in its step
  uint64_t step = 0;
  Action action = Action::offload;
  uint32_t uses = 0;      // how often backward has asked for it
  bool lives_on = false;  // Action::keep, because others are said to hold it
  uint32_t views = 0;     // Action::keep: tensors on it that were given to autograd
  uint32_t asks = 0;      // still to come, to make others of it
  bool root = false;      // autograd has not saved it: it is held to make others of it

  Lease kept;                        // Action::keep
  std::shared_ptr<Value> value;      // Action::recompute; shared with what is made of it
  Lease was;                         // and what it was, to compare, unless that is on the host
  HostCopy host;                     // Action::offload, in memory
  std::shared_ptr<Disk::Rest> rest;  // or on disk; shared with the threads that write and read it
  Fence left;                        // the copy to the host
  StorageRef on_board;               // what was fetched last, or nothing
  c10::VariableVersion board;        // of the tensors on it: who writes to one is seen
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
  // The tensor itself that was saved, where others have it and left it as it was; else undefined.
  at::Tensor original() const;
  // The saved view, on a storage that holds the original's content from `begin` on.
  at::Tensor view_of(c10::Storage storage, size_t begin, const c10::VariableVersion& counter) const;

  std::shared_ptr<State> state_;           // shared: backward may run after the session has ended
  std::shared_ptr<SavedStorage> storage_;  // shared by the views of one storage
  at::Tensor passed_;                      // where it stays on the device
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> original_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};

  Version version_;
  c10::SmallVector<int64_t, 5> sizes_;
  c10::SmallVector<int64_t, 5> strides_;
  size_t offset_ = 0;  // in bytes
  c10::ScalarType dtype_ = c10::ScalarType::Undefined;
  bool conj_ = false;
  bool neg_ = false;
};

}  // namespace tenure::offload
