// A small file that the kernel writes on each read (/proc, cgroup), kept open and read whole by
// one pread.
//
// Threading: read() from any thread. A file under /proc/self goes on describing the process that
// opened it: a forked child opens its own.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tenure {

class KernelFile {
 public:
  KernelFile() = default;
  // Not there or not allowed: is_open() is false and every read is empty.
  explicit KernelFile(const std::string& path);
  KernelFile(KernelFile&& other) noexcept;
  KernelFile& operator=(KernelFile&& other) noexcept;
  KernelFile(const KernelFile&) = delete;
  KernelFile& operator=(const KernelFile&) = delete;
  ~KernelFile();

  [[nodiscard]] bool is_open() const { return fd_ >= 0; }

  // The content now, up to the size of `buffer`, in which it lies. Empty when it cannot be read.
  [[nodiscard]] std::string_view read(std::span<char> buffer) const;

 private:
  int fd_ = -1;
};

// The whole of a file of any length, for one that is read once. Empty when it cannot be read.
std::string read_kernel_file(const std::string& path);

// The number at the start of `text`. None there ("max"): nullopt.
std::optional<int64_t> leading_number(std::string_view text);

// The number that follows `key` at the start of a line: ("Tgid:", "Name:\tx\nTgid:\t71\n") -> 71.
std::optional<int64_t> number_after(std::string_view key, std::string_view text);

// The same for a figure in kB ("VmRSS:\t  12 kB"), in bytes.
std::optional<int64_t> bytes_after(std::string_view key, std::string_view text);

}  // namespace tenure
