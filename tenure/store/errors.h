// What the store throws beside the errors of core: BudgetError when a cap is reached, InputError
// for arguments that cannot mean anything.
#pragma once

#include <tenure/core/error.h>

namespace tenure::store {

// A handle whose object is gone: says who freed it, when and why. Never another object's data.
class StaleHandle : public Error {
 public:
  using Error::Error;
};

// The process that owns the object is gone, or another one has taken its place.
class OwnerLost : public Error {
 public:
  using Error::Error;
};

// No answer within the time that was given: a cut link, a stopped process, a busy one.
class StoreTimeout : public Error {
 public:
  using Error::Error;
};

// Not let in: another job, user, secret or protocol, or not one of an object's collectors.
class AccessRefused : public Error {
 public:
  using Error::Error;
};

}  // namespace tenure::store
