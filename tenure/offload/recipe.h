// Recipe: how a storage that was dropped is made again. Inside offload only.
//
// Note [References of a recipe]
// A recipe holds no tensor. What it needs it knows as values, and a value is held by the session,
// on the device or on the host, under a lease, or has a recipe itself. Arrows lead from what is
// made to what it is made of, so that values go when the last saved tensor that needs them goes.
#pragma once

#include <tenure/core/lease.h>
#include <tenure/core/owner.h>
#include <tenure/core/storage_ref.h>
#include <tenure/offload/geometry.h>
#include <tenure/offload/interpose.h>
#include <tenure/offload/saved.h>
#include <tenure/offload/trace.h>

#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace tenure::offload {

struct Call;

// A storage that others are made of, or that is made again itself. Guarded by the session's lock,
// but for its end, which may come on any thread.
struct Value {
  Value(const at::Tensor& tensor, uint32_t place);
  // From now on it is held, as that, and not made again.
  void hold_for_good(const c10::Storage& content);

  StorageRef storage;
  Version version;  // when it was seen
  uint64_t bytes;
  uint32_t index;                    // in the trace
  OwnerId owner{};                   // of its leases
  uint32_t asks = 0;                 // still to come, by the plan
  bool written = false;              // since it was seen: its storage is something else now
  std::shared_ptr<const bool> lost;  // shared with all of its step: it did not follow its plan
  std::shared_ptr<Call> call;        // that makes it again; null: it is held
  uint32_t output = 0;               // of that call
  Geometry geometry;                 // of the output, or of the tensor on which it was first seen

  std::shared_ptr<SavedStorage> entry;  // held as what autograd saves is,
  Lease kept;                           // or on the device
  Lease memo;                           // made again, and to be asked for again
  c10::VariableVersion board;           // of the tensors on it
  // Made of this one, if it is held: before someone writes to it they are made for good.
  std::vector<std::weak_ptr<Value>> dependents;
};

// An argument of a call that was a tensor.
struct Source {
  uint32_t argument = 0;
  uint32_t element = kNone;            // of a list
  std::shared_ptr<Value> value;        // null: a number that torch had wrapped into a tensor
  std::unique_ptr<Geometry> geometry;  // of the tensor on it, where it is not the value's own
};

// A call of an operator, to be repeated.
struct Call {
  Call(const Operator& called, c10::Stream on, NameId in);

  const Operator* op;
  NameId module;
  c10::Stream stream;
  // In place: one is made for each call that is recorded.
  c10::SmallVector<c10::IValue, 6> arguments;  // nothing where a source comes, or the number
  c10::SmallVector<Source, 2> sources;
  c10::SmallVector<std::weak_ptr<Value>, 1> outputs;  // that are made again
};

// A tensor among the arguments: a plain one or, but in a list, a wrapped number.
struct Argument {
  uint32_t argument = 0;
  uint32_t element = kNone;  // of a list
  const at::Tensor& tensor;
};
// Calls `each` with them, in order. False, if there is something among the arguments that cannot be
// told again by value, or `each` says so.
bool each_tensor(const Operator& op, const torch::jit::Stack& stack,
                 c10::function_ref<bool(const Argument&)> each);

bool is_number(const at::Tensor& tensor);

// Tells calls apart by operator and by the sizes of their tensors. None: there are no tensors.
std::optional<uint64_t> sizes_of_call(const Operator& op, const torch::jit::Stack& stack);

// The output at that place, if it is a storage that one can know; else null.
const at::Tensor* output_at(const torch::jit::Stack& stack, const Operator& op, uint32_t place);

// "aten::silu in layers.3.mlp"
std::string call_text(NameId op, NameId module);

}  // namespace tenure::offload
