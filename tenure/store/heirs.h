// Heirs: processes that were forked from this one while it had objects of others mapped, and that
// have them mapped, too. Each has the end of a pipe, which the kernel closes when it ends or runs
// another program, and it itself when it has let go of all that it inherited: the other end says
// so here. One that closes descriptors which are not its own is not seen any more.
//
// Threading: any thread. Torch-free.
#pragma once

#include <tenure/store/descriptor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace tenure::store {

// One of them. Shared by the mappings that it inherited.
class Heir {
 public:
  explicit Heir(Descriptor alive) : alive_(std::move(alive)) {}
  [[nodiscard]] bool is_there() const;
  // To poll() on: it is readable when the heir is there no longer.
  [[nodiscard]] int descriptor() const { return alive_.get(); }

 private:
  Descriptor alive_;
};
using Heirs = std::vector<std::shared_ptr<const Heir>>;

// What is mapped here, for as long as it is. Movable by its owner's move alone: one for each
// mapping.
class Inheritable {
 public:
  Inheritable();
  Inheritable(const Inheritable&) = delete;
  Inheritable& operator=(const Inheritable&) = delete;
  Inheritable(Inheritable&&) = delete;
  Inheritable& operator=(Inheritable&&) = delete;
  ~Inheritable();

  // Those that inherited it and have not let go. None in an heir itself.
  [[nodiscard]] Heirs heirs() const;

 private:
  uint32_t generation_;  // of forks
  uint64_t born_;        // how many forks there were before
};

}  // namespace tenure::store
