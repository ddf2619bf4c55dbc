// Watcher: hears when another rank, or a person, asks all ranks for their snapshots, and asks them.
//
// A thread waits on a clone of the job's store for a key of its own rank: nothing goes over the
// network until somebody tells, and then all ranks wake within milliseconds, also those inside a
// collective. A second thread tells, and looks twice a second at a file, which reaches ranks on
// the same file system when the store's host has gone, and is how `tenure dump` asks.
//
// Threading: any method from any thread; none takes the GIL. A forked child has no threads, hears
// nothing, and its destructor does nothing.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace c10d {
class Store;
}  // namespace c10d

namespace tenure::telemetry {

class Watcher {
 public:
  struct Options {
    std::string file;    // of requests
    std::string prefix;  // of the keys: alike on all ranks, and of no earlier watcher of the job
    uint32_t rank = 0;
    uint32_t ranks = 1;
  };
  // With the text that was told, once for each text; on one of the threads.
  using Heard = std::function<void(const std::string&)>;

  // The store is cloned: a thread that waits on a store keeps all others from it. None: the file
  // alone. What the file says now is old.
  Watcher(const c10::intrusive_ptr<c10d::Store>& store, Options options, Heard heard);
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // Tells all ranks, this one too. Each text is told once: let it have a time in it. Whether no
  // other rank was first, which then has told all; true if that is not known within two seconds.
  bool tell(std::string text);

  // No more is heard after this. Takes a second at most, two if the store does not answer: then the
  // thread that waits for it is left to end with the process.
  void close();

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with a thread that was left
  std::unique_ptr<std::jthread> waiting_;
  std::unique_ptr<std::jthread> telling_;
  uint32_t generation_;
};

}  // namespace tenure::telemetry
