// Session: moves what autograd saves to the host, and back when backward asks. Begin it before a
// forward, end it after the backward (or after the forward: a backward that comes later is served
// all the same), again for every step. It learns from the steps: see planner.h.
//
//   offload::Session session({.budget = 8 << 30});
//   session.never(storages of the parameters and buffers);
//   for (...) { offload::Active active(session); loss = net(x); loss.backward(); }
//
// Note [By storage]
// Autograd saves tensors; memory is freed by storages. All views of one storage share one
// SavedStorage and one copy on the host, and autograd is given none of the tensors to hold, so the
// storage goes when forward is done with it. It is known by StorageRef and version (of which
// counter, and its number): never by its address, which the allocator gives to the next one, and
// not by its storage alone, which may be written to and saved again.
//
// Note [Fences of a saved storage]
// out:   waits for the compute stream (the content) and for earlier users of the host memory.
// gone:  the storage is let go when its copy is done, or when the compute stream waits for it.
// back:  waits for the compute stream (whoever had the memory before) and for `out`.
// use:   the stream that asked waits for `back`.
// Removing any of these makes a test fail: `scripts/fences` tries it with each.
//
// Threads: begin, end and pack are for one thread at a time; unpack and the end of Saved objects
// may come on any. No call waits for the device.
#pragma once

#include <tenure/core/storage_ref.h>
#include <tenure/offload/fit_planner.h>
#include <tenure/offload/fitted.h>
#include <tenure/offload/options.h>
#include <tenure/offload/saved.h>
#include <tenure/offload/stats.h>

#include <memory>
#include <optional>
#include <vector>

namespace tenure::offload {

class Promise;

// Whether a fetched storage may serve several nodes of a backward, or may be written to by the one
// that asked (compiled backwards reuse the memory of what they were given).
enum class Sharing : uint8_t { shared, own };

class Session {
 public:
  // Throws InputError for options that make no sense together, or here.
  explicit Session(Options options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // These storages stay where they are, from now on. Replaces those named before.
  void never(std::vector<StorageRef> storages);

  // Throws InputError if it has begun.
  void begin();
  // Throws BudgetError if the step has shown that the budget cannot be met; the step itself is
  // whole, and the next one is measured again.
  void end();
  // Ends a step that an exception has cut short: nothing is learnt from it, nothing is thrown.
  void abandon();
  bool active() const;
  // Whether the step that has begun is one that is learnt from.
  bool measuring() const;

  // For autograd's hooks. `known`: why the caller wants the tensor kept.
  Saved pack(const at::Tensor& tensor, std::optional<Kept> known = {});
  // For what it does not understand: autograd gets it back as it is.
  Saved pass(const at::Tensor& tensor);
  static at::Tensor unpack(const Saved& saved, Sharing sharing = Sharing::shared);
  // The storages that it keeps alive, on the device or on the host. Does not wait: what another
  // thread has in its hands at this moment is left out.
  static std::vector<c10::Storage> held(const Saved& saved);

  // Lets go what has been copied. Nobody needs to call it: a thread does the same.
  void settle();
  Stats stats() const;
  // With Options::recompute: what the plan last used does, and what other budgets would cost.
  Fitted fitted() const;
  std::vector<Point> frontier(size_t points) const;
  const Options& options() const;

 private:
  std::shared_ptr<State> state_;  // shared with what is saved
  std::unique_ptr<Promise> promise_;
};

}  // namespace tenure::offload
