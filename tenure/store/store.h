// Store: tensors that other processes fetch. A process joins a job; what it puts it owns, and
// serves from a thread of its own; what others put it fetches by their handles. There is no master:
// a handle says where to go.
//
// A scope owns what is put in it, and is named alike in every process of the job: closing it frees
// the objects, and what consumers keep of them. See Objects for who may fetch, and when it goes.
//
// Threading: all methods from any thread. None takes the GIL; release it before calling, as the
// bindings do. In a forked child a Store is the parent's: make another one.
#pragma once

#include <tenure/store/client.h>
#include <tenure/store/delivery.h>
#include <tenure/store/handle.h>
#include <tenure/store/objects.h>
#include <tenure/store/options.h>
#include <tenure/store/server.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tenure::store {

// What closing a scope did, here and at the owners of what was adopted into it.
struct Closing {
  Account here;
  std::vector<std::pair<Member, ClosedAnswer>> elsewhere;
  std::vector<Unreached> unreached;  // each says whether it is asked again at later closings
};

struct StoreStats {
  ObjectsStats objects;
  ServerStats server;
  uint64_t kept_bytes = 0;      // fetched, and kept here until their scopes close
  uint64_t passed_through = 0;  // puts that gave the handle that the tensor came with
  uint64_t shared = 0;          // puts that gave another handle on bytes stored already
};

class Store {
 public:
  // Serves when it returns. Throws InputError, AccessRefused, tenure::Error.
  explicit Store(StoreOptions options);
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  Store(Store&&) = delete;
  Store& operator=(Store&&) = delete;
  ~Store();

  [[nodiscard]] const Origin& origin() const;

  // The tensor as it is now: later writes to it change nothing here. Of any device and strides;
  // what is stored is its elements, contiguous. Throws InputError for a tensor without bytes,
  // BudgetError when there is no room.
  Handle put(const ScopeName& scope, const at::Tensor& tensor, const PutOptions& options = {});
  // A handle of something that is not stored, and why: "rank 3 is no source".
  Handle unstored(const ScopeName& scope, const at::Tensor& tensor, std::string why);

  // Each throws StaleHandle, OwnerLost, StoreTimeout, AccessRefused, InputError, naming the object.
  at::Tensor get(const Handle& handle, const GetOptions& options = {});
  // In one request to each owner, all owners at once; all or nothing.
  std::vector<at::Tensor> get_all(std::span<const Handle> handles, const GetOptions& options = {});

  // get_all() in two steps, for a caller that may wait no longer when the tensors are there. Only
  // accept() makes it a fetch. REQUIRES: the handles stay until then.
  Parcel fetch(std::span<const Handle> handles, const GetOptions& options = {});
  void accept(const Parcel& parcel);

  // See Objects.
  uint32_t begin_call(const ScopeName& scope, const std::string& call);
  void fail_call(const ScopeName& scope, const std::string& call, uint32_t attempt);

  // Closing the scope will free these too, at their owners.
  void adopt(const ScopeName& scope, std::span<const Handle> handles);
  Closing close(const ScopeName& scope);
  [[nodiscard]] Account account(const ScopeName& scope) const;
  Client::FreeAnswer free(std::span<const Handle> handles);

  // What was kept here (GetOptions::keep) of these, or of a scope, is let go of, as is what is on
  // its way. Each answers how many they were. Owners are not asked.
  size_t forget(std::span<const Handle> handles);
  size_t forget(const ScopeName& scope);
  [[nodiscard]] size_t kept_of(const ScopeName& scope) const;

  [[nodiscard]] StoreStats stats() const;
  [[nodiscard]] std::vector<Listed> list(uint32_t from, size_t most, uint32_t* next) const;
  [[nodiscard]] std::vector<StillMapped> still_mapped() const;

  // The stats or a page of the list, as JSON, of another process of this host and user.
  TextAnswer ask(const std::string& socket, const Ask& question);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tenure::store
