// Disk: offloaded bytes in a file, written and read by threads of its own, around the page cache
// where the file system allows. The file has no name, so nothing is left of it however the process
// ends.
//
// Bytes come in a HostCopy, which is given up when they are written, and leave in another. Only who
// asks for bytes that are not in memory waits, and whoever brings some while too many are
// unwritten.
//
// Any thread may call.
#pragma once

#include <tenure/core/fence.h>
#include <tenure/offload/host_copy.h>
#include <tenure/offload/moved.h>
#include <tenure/offload/own_thread.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

namespace tenure::offload {

class Disk {
 public:
  // The bytes of one storage: in memory, in the file, or both.
  class Rest;

  // Throws InputError if no file can be made in the folder.
  explicit Disk(const std::string& folder);
  ~Disk();
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  // Waits while more than so many bytes are in memory that are not written yet.
  void wait_for_writes(uint64_t unwritten);
  // Writes the copy once `left` is ready. Throws BudgetError once the disk is full; what was put
  // before stays readable, from memory where it could not be written.
  std::shared_ptr<Rest> put(HostCopy copy, Fence left);
  // Between steps: a disk that was full may have room again, and a file that is much larger than
  // what was in it since the last call is cut.
  void begin_step();

  // Begins to read into `room`, which has as many bytes as were put, unless they are in memory.
  void read_ahead(const std::shared_ptr<Rest>& rest, const std::function<HostCopy()>& room);
  // Calls `use` with the bytes in memory, reading them into `room` if they are not. Throws
  // tenure::Error if they cannot be read.
  void with_bytes(const std::shared_ptr<Rest>& rest, const std::function<HostCopy()>& room,
                  const std::function<void(HostCopy&)>& use);

  bool full() const;
  Moved written() const;          // to the file, by the clock
  Moved read_back() const;        // from it
  double waited_seconds() const;  // by those who asked, since the last step began
  uint64_t bytes() const;         // in the file
  uint64_t file_bytes() const;    // the file's own size

 private:
  // How long at least one transfer of a kind was under way, and what it moved.
  struct Busy {
    Moved moved;
    uint32_t now = 0;
    uint64_t since = 0;
    void begin();
    void end(uint64_t bytes);
  };
  struct Job {
    std::shared_ptr<Rest> rest;
    bool read = false;
  };

  void work(const std::stop_token& stop);
  void run(const Job& job);
  void give_up(const Job& job);
  void write(Rest& rest);
  void read(Rest& rest);
  static HostCopy forget_memory(Rest& rest);
  int64_t take_room(uint64_t bytes);
  void give_room(int64_t offset, uint64_t bytes);
  void room_is_free(int64_t offset, uint64_t bytes);

  std::string folder_;
  int file_ = -1;
  mutable std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Job> jobs_;
  std::map<int64_t, uint64_t> free_;  // room inside the file, by offset
  int64_t end_ = 0;
  uint64_t used_ = 0;
  uint64_t most_used_ = 0;  // since the last step began
  uint64_t unwritten_ = 0;
  Busy writing_;
  Busy reading_;
  double waited_ = 0;
  std::string full_;                // why nothing more can be written
  std::vector<OwnThread> threads_;  // last: stop first
};

}  // namespace tenure::offload
