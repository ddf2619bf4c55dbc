// NewFile: a file that appears whole or not at all. It is written beside its final name, and takes
// that name when it is complete and on the disk; whatever was there under the name stays until
// then, and stays for good if the writing fails.
//
// One thread at a time.
#pragma once

#include <tenure/train/hash.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tenure::train {

// What is in a file, to tell whether it still is.
struct Written {
  uint64_t bytes = 0;
  uint64_t hash = kHashOfNothing;

  bool operator==(const Written&) const = default;
};

class NewFile {
 public:
  // Throws InputError if no file can be made there.
  explicit NewFile(std::string path);
  // Removes what was not committed.
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  // Both throw tenure::Error where the disk refuses.
  void write(const void* data, size_t bytes);
  void commit();

  // Of what was written.
  Written written() const { return written_; }

 private:
  [[noreturn]] void fail(int error) const;

  std::string path_;
  std::string beside_;  // what it is called while it is written
  int fd_ = -1;
  Written written_;
};

// Has the names in a folder survive a crash. A file system that cannot sync folders has none.
void sync_folder(const std::string& path);

Written write_whole(const std::string& path, std::string_view content);

}  // namespace tenure::train
