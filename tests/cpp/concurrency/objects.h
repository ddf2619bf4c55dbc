// Reference-counted objects in place of storages, so that the lease machinery runs without torch.
#pragma once

#include <atomic>
#include <cstdint>

namespace tenure::test {

struct Object {
  std::atomic<int> references{1};
  // Runs when the last reference goes, as a storage's deleter would.
  void (*on_death)() = nullptr;

  static std::atomic<int> alive;
  Object() { alive.fetch_add(1); }
  ~Object() { alive.fetch_sub(1); }
};

}  // namespace tenure::test
