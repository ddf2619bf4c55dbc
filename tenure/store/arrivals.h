// Arrivals: what this process fetched. Weakly, so that a tensor that is put again unchanged is
// known by its handle; and as leases, what it was asked to keep until the scope closes.
//
// Threading: any thread. A closed scope is told on the client's thread, which then frees what was
// kept of it.
#pragma once

#include <tenure/core/alias.h>
#include <tenure/core/storage_ref.h>
#include <tenure/store/client.h>
#include <tenure/store/handle.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tenure::store {

class Arrivals {
 public:
  // The whole of the handle's object has arrived in `tensor`: over `mapping`, or copied (null).
  void note(const at::Tensor& tensor, const Handle& handle,
            const std::shared_ptr<const Mapping>& mapping);

  // What the tensor was when it arrived, if it is all of it and nothing that torch sees was written
  // to it since. Whether the bytes are still the same is the caller's to find out.
  struct Known {
    Handle handle;
    std::shared_ptr<const Mapping> mapping;  // shared with the tensor, which may let go of it
  };
  std::optional<Known> arrived_as(const at::Tensor& tensor);

  // Now, in the order of what is forgotten: for who begins a fetch.
  [[nodiscard]] uint64_t moment();
  // Not if the scope was closed meanwhile, or the object withdrawn, or forgotten since that moment.
  void keep(const Handle& handle, const at::Tensor& tensor, uint64_t since);
  std::optional<at::Tensor> kept(const Handle& handle);
  // Each answers how many were kept.
  size_t forget(std::span<const Handle> handles);
  size_t forget(const ScopeName& scope);
  [[nodiscard]] size_t kept_of(const ScopeName& scope);
  [[nodiscard]] uint64_t kept_bytes();

  // Each frees what was kept and remembers, so that what arrives late is not kept.
  void scope_closed(const Member& owner, const ScopeName& scope);
  void scope_closed_by_us(const ScopeName& scope);
  void withdrawn(const Member& owner, std::span<const ObjectId> ids);
  // It may have closed any scope meanwhile: frees all that was kept from it.
  void owner_lost(const Member& owner);

 private:
  struct Arrival {
    Handle handle;
    bool is_mapped = false;
    std::weak_ptr<const Mapping> mapping;
    uint32_t version = 0;
  };
  using Key = std::tuple<uint64_t, uint32_t, uint32_t>;  // incarnation, slot, generation
  struct Kept {
    ScopeName scope;
    uint64_t bytes = 0;
    Alias alias;
  };
  using Closed = std::pair<uint64_t, ScopeName>;  // an owner's incarnation, 0 for any

  static Key key_of(const Handle& handle);
  void sweep();
  template <class Goes>
  size_t drop(const Goes& goes);

  std::mutex mutex_;
  std::unordered_map<StorageRef, Arrival> arrivals_;
  size_t sweep_at_ = 1024;
  std::map<Key, Kept> kept_;
  std::set<Closed> closed_;
  std::deque<Closed> closed_order_;
  std::set<Key> withdrawn_;
  std::deque<Key> withdrawn_order_;
  uint64_t moment_ = 0;  // how often something was forgotten
  std::map<Key, uint64_t> forgotten_;
  std::deque<Key> forgotten_order_;
  std::map<ScopeName, uint64_t> forgotten_scopes_;
};

}  // namespace tenure::store
