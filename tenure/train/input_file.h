// InputFile: a user's file, read at any offset. Its size is what it was when it was opened.
//
// read() from any thread.
#pragma once

#include <cstdint>
#include <string>

namespace tenure::train {

class InputFile {
 public:
  // Throws InputError, with the reason, if it is not there or no file.
  explicit InputFile(std::string path);
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  ~InputFile();

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }

  // All of these bytes, or InputError: the file was cut after it was opened, or cannot be read.
  void read(void* data, uint64_t bytes, uint64_t offset) const;

 private:
  std::string path_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

std::string read_whole(const std::string& path);

// False also where that cannot be found out: who opens it is told why.
bool is_folder(const std::string& path);

}  // namespace tenure::train
