// The one hierarchy of errors. Every message says what happened, to which storage, who did it,
// where, and what to do next. Python sees the same names under tenure.TenureError.
#pragma once

#include <stdexcept>

namespace tenure {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A released storage was read, or released a second time.
class UseAfterRelease : public Error {
 public:
  using Error::Error;
};

// A storage that cannot be released or refilled: not ours to free, the wrong size, not released.
class ReleaseError : public Error {
 public:
  using Error::Error;
};

// A scope opened or closed out of order, twice, from another thread, or with leases left in it.
class ScopeError : public Error {
 public:
  using Error::Error;
};

// A tensor that cannot be leased, or a lease used after its release.
class LeaseError : public Error {
 public:
  using Error::Error;
};

// A saved or shared storage was written to while someone relied on its content.
class MutationError : public Error {
 public:
  using Error::Error;
};

// A limit on memory that cannot be kept; says what the least is.
class BudgetError : public Error {
 public:
  using Error::Error;
};

// Ranks that work together did not: one ended, hangs, or does something else.
class CollectiveError : public Error {
 public:
  using Error::Error;
};

// An argument that cannot mean anything: an unknown owner kind, a name with a newline in it.
class InputError : public Error {
 public:
  using Error::Error;
};

}  // namespace tenure
