// NewFile: a file that appears whole or not at all. It is written beside its final name, and takes
// that name when it is complete and on the disk; whatever was there under the name stays until
// then, and stays for good if the writing fails.
//
// One thread at a time.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tenure::train {

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

 private:
  [[noreturn]] void fail(int error) const;

  std::string path_;
  std::string beside_;  // what it is called while it is written
  int fd_ = -1;
};

void write_whole(const std::string& path, std::string_view content);

}  // namespace tenure::train
