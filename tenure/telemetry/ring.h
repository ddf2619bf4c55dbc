// Ring: the last rows of one rank in a file that others read while it is written, and that is still
// there when the kernel has killed the rank.
//
// One file a process, of a size that never changes: a head that says who writes and what each
// figure is, then slots of one row each, used in turn (ring.cpp has the layout). The disk's room is
// taken when the ring is made, so a full disk is an error then and not a signal later.
//
// Threading: any method from any thread. Readers are other processes, for which nobody waits.
// Fork: a ring is its maker's. What a child calls on one that it inherited does nothing.
#pragma once

#include <tenure/telemetry/keys.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

namespace tenure::telemetry {

struct RingIdentity {
  std::string host;
  int rank = 0;
  int ranks = 1;
  int stage = 0;
  int stages = 1;
  std::string role;
  int attempt = 0;  // how often the job was restarted before
};

class Ring {
 public:
  static constexpr size_t kSlots = 512;

  // Makes `folder` where it is not there, and in it {host}-{rank}-{pid}-{attempt}.ring. Throws
  // InputError when that cannot be: no folder, no permission, no room.
  Ring(const std::string& folder, const RingIdentity& identity, size_t slots = kSlots);
  ~Ring();  // close("ended")
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // A fraction of a microsecond: no system call. After close() it does nothing.
  void append(const Row& row) noexcept;

  // Waits until the disk has all of it. Readers on this host need no flush; on a network file
  // system those on other hosts do. Not for the training thread: takes as long as the disk does.
  void flush() noexcept;

  // Tells readers why the process ends, should it be gone without a close().
  void note(std::string_view reason) noexcept;

  // Tells readers that no more will come, and why. The first call counts.
  void close(std::string_view reason) noexcept;

  const std::string& path() const { return path_; }
  uint64_t appended() const;

 private:
  bool is_ours() const;  // and not inherited from the process that forked

  std::string path_;
  size_t slots_;
  size_t size_ = 0;
  std::byte* file_ = nullptr;  // mapped
  uint64_t* rows_ = nullptr;   // in it
  uint64_t appended_ = 0;
  uint32_t process_;
  mutable std::mutex mutex_;
};

}  // namespace tenure::telemetry
