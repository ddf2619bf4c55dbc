// LastWord: the snapshot that a rank can write without Python: who it is, the step, and what the
// operating system, the devices' allocators and the ledger say. It is there in milliseconds, also
// while another thread keeps the GIL; a fuller one may replace it.
//
// Threading: any method from any thread.
#pragma once

#include <chrono>
#include <mutex>
#include <string>

namespace tenure::telemetry {

class LastWord {
 public:
  // `identity` is a JSON object with at least one member, which those of ours follow.
  LastWord(std::string path, std::string identity);

  // Writes the file whole or not at all; `headline` is JSON. False if it could not be written, or
  // if what is there is to be kept.
  bool write(const std::string& headline);

  // What would be written.
  std::string text(const std::string& headline) const;

  // From now on what is written has this JSON in it as "earlier": a failure that the rank survived,
  // which a later snapshot would hide.
  void remember(std::string earlier);

  // What is there, or about to be, is more than this could tell: for a while nothing replaces it.
  // What goes wrong later is another story.
  void keep(std::chrono::steady_clock::duration time = std::chrono::minutes(1));

 private:
  const std::string path_;
  const std::string identity_;
  mutable std::mutex mutex_;
  std::string earlier_;  // none: empty
  std::chrono::steady_clock::time_point kept_until_;
};

}  // namespace tenure::telemetry
