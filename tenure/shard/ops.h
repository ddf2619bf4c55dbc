// Ops: how a compiled graph gathers and releases. Operators of torch that take what they act on as
// numbers, and the parameters (or the gradient) only so that a compiler keeps the order: reads of a
// tensor that an operator may write to stay on their side of it.
//
//   tenure::gather(Tensor(a!)[] parameters, int model, int unit) -> ()
//   tenure::wait(Tensor(a!)[] parameters, int model, int unit) -> ()
//   tenure::release(Tensor(a!)[] parameters, int model, int unit) -> ()
//   tenure::reduce(Tensor(a!) gradient, int model, int unit, int flat, int parameter,
//                  bool last) -> ()
#pragma once

#include <cstdint>
#include <memory>

namespace tenure::shard {

class Sharder;

// From now on operators find it under the number that is returned, as long as it lives. Numbers are
// not used twice. Any thread.
int64_t number_model(const std::shared_ptr<Sharder>& sharder);

}  // namespace tenure::shard
