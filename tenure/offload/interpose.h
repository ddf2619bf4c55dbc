// Interpose: sees the calls of operators on a thread, above autograd and autocast, so that what an
// output was made of can be recorded before anybody saves it.
//
// Note [Above autograd]
// Every operator has a slot for a mode above autograd that torch itself leaves unused but for its
// tests. The first watcher puts a kernel there for each operator that makes or writes tensors; the
// slot is passed over on all threads but those that are watched. Views and composite operators have
// no kernel: views make no storage, and composites are seen as what they are made of. Where
// autocast has something to do it is let through first, so that its casts are calls like others;
// and so are transforms like vmap, whose calls on the tensors inside are seen.
// What a kernel calls inside is not seen: the call that was made stands for all of it.
//
// Operators that are registered later get their kernel when a watcher comes next.
#pragma once

#include <tenure/core/names.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace tenure::offload {

struct Operator {
  explicit Operator(const c10::OperatorHandle& op);

  c10::OperatorHandle handle;
  NameId name;
  uint32_t arguments;
  uint32_t returns;
  c10::SmallVector<uint32_t, 2> writes;  // arguments that it writes to,
  std::optional<uint32_t> writes_if;     // where this one is true; none: always
  // It makes its outputs of its inputs alone, does nothing else, and is not random. Whether it
  // gives the same bits again is for whoever tries.
  bool pure;
};

// A call of an operator that is about to be made. What is boxed costs time: only who asks pays.
class Invocation {
 public:
  virtual ~Invocation() = default;
  // The last ones on the stack; until run().
  virtual const torch::jit::Stack& arguments() = 0;
  // Makes it, once, unseen by watchers.
  virtual void run() = 0;
  // The last ones on the stack; after run().
  virtual const torch::jit::Stack& outputs() = 0;

 protected:
  Invocation() = default;
  Invocation(const Invocation&) = default;
  Invocation& operator=(const Invocation&) = default;
};

class Watcher {
 public:
  virtual ~Watcher() = default;
  // Instead of the operator: runs it.
  virtual void call(const Operator& op, Invocation& invocation) = 0;

 protected:
  Watcher() = default;
  Watcher(const Watcher&) = default;
  Watcher& operator=(const Watcher&) = default;
};

// From now on on this thread. Throws InputError if someone watches it already.
void watch_calls(std::shared_ptr<Watcher> watcher);
// No more, if it was this one.
void unwatch_calls(const Watcher& watcher);

// Runs what is in its lifetime as if nobody watched, without autograd, autocast and Python's modes.
class Plainly {
 public:
  Plainly();

 private:
  c10::impl::ExcludeDispatchKeyGuard keys_;
};

}  // namespace tenure::offload
