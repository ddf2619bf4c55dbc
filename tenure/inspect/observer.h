// Observer: sees storages born and gone in any PyTorch program, its own threads and C++ included.
// While it is off nothing is installed and nothing is asked.
//
// Births and deaths come from the allocator, the operator from a RecordFunction callback, the line
// of code and the module from the language's frames (frames.h), and of a storage born in backward
// the forward line from the node that runs: see Note [Where a storage comes from].
//
// One per process. start() and stop() belong to one thread at a time; all else is for any. A forked
// child is not observed.
#pragma once

#include <tenure/inspect/birth_table.h>

#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace tenure {
class StorageRef;
}

namespace tenure::inspect {

enum class Level : uint8_t {
  off,
  count,  // how many bytes are alive
  trace,  // each storage: operator, module, phase, step, line
  deep,   // and the whole stack
};

class Observer {
 public:
  void start(Level level);
  // What was born is still counted out when it dies, and nothing else is seen.
  void stop();
  Level level() const;
  // While observing: sees less from now on, e.g. because seeing more costs too much.
  void step_down(Level level);
  // While observing: sees more from now on. Storages that were counted so far are adopted one by
  // one by whoever finds them; of the others the count goes on.
  void step_up(Level level);

  // Births from now on belong to this step.
  void set_step(uint64_t step);

  // A storage that was there before, or that was only counted: its death will be seen. Returns
  // false for memory that does not come from the allocator, or that is known. REQUIRES: nobody
  // frees the storage meanwhile.
  bool adopt(c10::StorageImpl& storage);
  // The same for one that was made just now and not by the allocator that programs can replace, as
  // Python's UntypedStorage(n) is: its birth.
  bool welcome(c10::StorageImpl& storage);

  // The same for one whose memory no allocator of torch's made and whose death nobody tells: it is
  // found gone by sweep(). Known by the address of the StorageImpl, which lasts until then. One
  // that is known already, or whose memory is, stays as it is.
  enum class Memory : uint8_t { heap, shared, pinned };
  void welcome_foreign(c10::StorageImpl& storage, Memory memory);
  // The same for one that was found later, so that its line is not known.
  void find_foreign(c10::StorageImpl& storage);
  // The same for one that a part of Tenure's copied another one to: it was made where that was.
  void welcome_copy(c10::StorageImpl& copy, const StorageRef& original);
  void sweep();
  // Of those, what lies in shared memory, and in pinned memory.
  int64_t shared_bytes() const;
  int64_t pinned_bytes() const;
  // Bytes of storages that lie in malloc's heap: on the CPU all, or those of other libraries alone.
  int64_t malloced_bytes() const;

  // An interpreter maps memory for its objects itself, past malloc: so much more, or less.
  void interpreter_took(int64_t bytes);
  // The sum of that since someone began to tell, which may be less than nothing.
  int64_t interpreter_bytes() const;

  // What a device's allocator tells: see cuda/tracker.cpp.
  void device_born(const void* data, uint64_t bytes, uint16_t device);
  // The same of one whose line is known from elsewhere.
  void device_born_at(const void* data, uint64_t bytes, uint16_t device, NameId site);
  void device_died(const void* data, uint64_t bytes);
  // Whether storages on the CPU lie in malloc's heap, rather than in another allocator's.
  bool storages_are_malloced() const;
  // Bytes alive on devices, which births().flow() counts too.
  int64_t device_bytes() const;
  // Storages on devices are seen from now on.
  void see_devices();

  BirthTable& births();
  // Nanoseconds spent on observing so far, estimated from every 64th birth.
  uint64_t cost() const;
  uint64_t operators() const;  // seen so far
};

Observer& observer();

}  // namespace tenure::inspect
